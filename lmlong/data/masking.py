"""Masking of tokens for an encoder. Masked positions and replacements are pure functions, so that there is nothing to
save, and the same position of a text is masked in every run, every validation and every model."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from lmlong import recipe
from lmlong.data.batches import TrainingBatches, evenly, in_batches
from lmlong.data.cyclic_tokens import IGNORED, Row
from lmlong.data.packing import cut
from lmlong.data.rows import Rows
from lmlong.data.shuffle import draw
from lmlong.data.token_file import TokenFile
from lmlong.data.tokenizers.base import Tokenizer

REPLACEMENTS = {"bert": (0.8, 0.9), "plain": (1.0, 1.0)}
"""Shares of the masked tokens replaced by the mask token, and by it or a random token; the rest stays unchanged."""

VALIDATION = 0
"""The seed of the masked positions of a validation text, whatever the seed of a run is."""


class MaskedBatch(NamedTuple):
    """Rows of tokens, some of them masked."""

    tokens: np.ndarray  # (rows, time) int64, after masking
    targets: np.ndarray  # (rows, time) int64, the masked tokens, IGNORED elsewhere
    padding: np.ndarray  # (rows, time) bool, true where a row has no token


class MaskedRow(NamedTuple):
    """One row."""

    tokens: np.ndarray  # (time,) int64, after masking
    targets: np.ndarray  # (time,) int64


class Masker:
    """Masks tokens of a text, but never bos or eos; the id of the mask token follows the last of the vocabulary."""

    def __init__(self, options: recipe.Masking, tokenizer: Tokenizer):
        self.share = options.share
        self.as_mask, self.as_mask_or_random = REPLACEMENTS[options.kind]
        self.mask_token, self.eos = tokenizer.vocabulary, tokenizer.eos
        self.ends = [tokenizer.bos, tokenizer.eos]
        self.words = np.setdiff1d(np.arange(tokenizer.vocabulary), self.ends)

    def mask_row(self, tokens: np.ndarray, key: tuple[int, ...], position: int = 0) -> MaskedRow:
        """Return the masked row of the tokens from `position` of a text on; masked positions depend on its key."""
        chance, fate, word = _uniform(key, position, len(tokens))
        can_be = ~np.isin(tokens, self.ends)
        chosen = can_be & (chance < self.share)
        if can_be.any() and not chosen.any():  # else a short row might have no target
            chosen[np.where(can_be, chance, 1).argmin()] = True
        random = self.words[(word * len(self.words)).astype(np.int64)]
        shown = np.where(fate < self.as_mask, self.mask_token, np.where(fate < self.as_mask_or_random, random, tokens))
        return MaskedRow(np.where(chosen, shown, tokens), np.where(chosen, tokens, IGNORED))

    def padded(self, rows: Sequence[MaskedRow], time: int) -> MaskedBatch:
        """Return rows as a batch, padded to `time`."""
        tokens = np.full((len(rows), time), self.eos, dtype=np.int64)
        targets = np.full((len(rows), time), IGNORED, dtype=np.int64)
        padding = np.ones((len(rows), time), dtype=np.bool_)
        for number, row in enumerate(rows):
            filled = len(row.tokens)
            tokens[number, :filled], targets[number, :filled], padding[number, :filled] = *row, False
        return MaskedBatch(tokens, targets, padding)


class MaskedBatches(TrainingBatches):
    """Training batches with tokens masked in each row, by the number of the row, so that ranks and resumes agree."""

    def __init__(self, sources: Sequence[Rows], weights: Sequence[float], masker: Masker, batch_size: int, seed: int):
        super().__init__(sources, weights, masker.eos, batch_size)
        self._masker, self._seed = masker, seed

    def collate(self, rows: Sequence[Row], first: int, time: int) -> MaskedBatch:
        hidden = [self._masker.mask_row(row.tokens, (self._seed, first + number)) for number, row in enumerate(rows)]
        return self._masker.padded(hidden, time)


class ValidationPieces(NamedTuple):
    """Pieces of a text, each read by itself, the longest first."""

    begins: np.ndarray  # (pieces,)
    ends: np.ndarray  # (pieces,)

    @staticmethod
    def of(text: TokenFile, length: int, whole_documents: bool, limit: int | None = None) -> "ValidationPieces":
        """Return windows of `length`, or whole documents, cut where longer; of all, or of an even sample of about
        `limit` tokens."""
        if whole_documents:
            begins, ends = cut(text.starts, len(text.tokens), length)
        else:
            begins = np.arange(0, len(text.tokens), length)
            ends = np.minimum(begins + length, len(text.tokens))
        if limit is not None and limit < len(text.tokens):
            chosen = evenly(len(begins), len(begins) * limit // len(text.tokens))
            begins, ends = begins[chosen], ends[chosen]
        order = np.argsort(begins - ends, kind="stable")
        return ValidationPieces(begins[order], ends[order])

    def batches(self, tokens: np.ndarray, masker: Masker, rows: int, ranks: int = 1) -> Iterator[MaskedBatch]:
        """Iterate over all pieces in batches; batches without tokens make their number a multiple of `ranks`."""
        for numbers in in_batches(len(self.begins), rows, ranks):
            spans = [(int(self.begins[number]), int(self.ends[number])) for number in numbers]
            hidden = [masker.mask_row(tokens[begin:end].astype(np.int64), (VALIDATION,), begin) for begin, end in spans]
            nothing = [MaskedRow(np.zeros(0, np.int64), np.zeros(0, np.int64))]
            yield masker.padded(hidden or nothing, max([1, *(end - begin for begin, end in spans)]))


def _uniform(key: tuple[int, ...], position: int, count: int) -> np.ndarray:
    """Return three numbers in [0, 1) for each of `count` positions (3, count), whatever other positions are asked."""
    bits = np.random.PCG64(draw(*key))
    bits.advance(3 * position)
    return (bits.random_raw(3 * count).reshape(count, 3).T >> np.uint64(11)) * 2.0**-53
