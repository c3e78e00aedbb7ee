"""Mask tokens for an encoder. Masked positions and replacements are pure functions of a seed and a position, so there
is no state to save, and every validation masks the same tokens."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from lmlong import recipe
from lmlong.data.batches import TrainingBatches, evenly, in_batches, pad
from lmlong.data.rows import IGNORED, Row, Rows, cut
from lmlong.data.shuffle import draw
from lmlong.data.token_file import TokenFile
from lmlong.data.tokenizers.base import Tokenizer

REPLACEMENTS = {"bert": (0.8, 0.9), "plain": (1.0, 1.0)}
"""Cumulative shares of the masked tokens that become the mask token, or a random token. The rest stays unchanged."""

VALIDATION = 0
"""Seed of the masked positions of a validation text, whatever the run's seed."""


class MaskedBatch(NamedTuple):
    """Rows of tokens, some of them masked."""

    tokens: np.ndarray  # (rows, time) int64, after masking
    targets: np.ndarray  # (rows, time) int64, the masked tokens, IGNORED elsewhere
    padding: np.ndarray  # (rows, time) bool, whether it is padding


class MaskedRow(NamedTuple):
    """One row."""

    tokens: np.ndarray  # (time,) int64, after masking
    targets: np.ndarray  # (time,) int64


class Masker:
    """Masks tokens of a text, but never bos or eos. The id of the mask token is the vocabulary size."""

    def __init__(self, options: recipe.Masking, tokenizer: Tokenizer):
        self.share = options.share
        self.as_mask, self.as_mask_or_random = REPLACEMENTS[options.kind]
        self.mask_token, self.eos = tokenizer.vocabulary, tokenizer.eos
        self.ends = [tokenizer.bos, tokenizer.eos]
        self.words = np.setdiff1d(np.arange(tokenizer.vocabulary), self.ends)

    def mask_row(self, tokens: np.ndarray, key: tuple[int, ...], position: int = 0) -> MaskedRow:
        """Return the masked row of tokens that begin at `position` of a text. `key` and `position` determine what is
        masked."""
        chance, fate, word = _uniform(key, position, len(tokens))
        maskable = ~np.isin(tokens, self.ends)
        chosen = maskable & (chance < self.share)
        if maskable.any() and not chosen.any():  # otherwise a short row might have no target
            chosen[np.where(maskable, chance, 1).argmin()] = True
        random = self.words[(word * len(self.words)).astype(np.int64)]
        shown = np.where(fate < self.as_mask, self.mask_token, np.where(fate < self.as_mask_or_random, random, tokens))
        return MaskedRow(np.where(chosen, shown, tokens), np.where(chosen, tokens, IGNORED))

    def padded(self, rows: Sequence[MaskedRow], time: int) -> MaskedBatch:
        """Return rows as a batch, padded to `time`."""
        unpadded = [(*row, np.zeros(len(row.tokens), np.bool_)) for row in rows]
        return MaskedBatch(*pad(unpadded, time, (self.eos, IGNORED, True)))


class MaskedBatches(TrainingBatches):
    """Training batches with masked tokens. The number of a row determines its masks, so that ranks and resumed runs
    agree."""

    def __init__(self, sources: Sequence[Rows], weights: Sequence[float], masker: Masker, batch_size: int, seed: int):
        super().__init__(sources, weights, masker.eos, batch_size)
        self._masker, self._seed = masker, seed

    def collate(self, rows: Sequence[Row], first: int, time: int) -> MaskedBatch:
        hidden = [self._masker.mask_row(row.tokens, (self._seed, first + number)) for number, row in enumerate(rows)]
        return self._masker.padded(hidden, time)


class ValidationPieces(NamedTuple):
    """Pieces of a text, which are read separately, the longest first."""

    begins: np.ndarray  # (pieces,)
    ends: np.ndarray  # (pieces,)

    @staticmethod
    def of(text: TokenFile, length: int, whole_documents: bool, limit: int | None = None) -> "ValidationPieces":
        """Return windows of `length`, or whole documents cut to `length`, of the whole text or of an even sample of
        about `limit` tokens."""
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
        """Yield all pieces in batches. Batches without tokens are added until their number is a multiple of
        `ranks`."""
        for numbers in in_batches(len(self.begins), rows, ranks):
            spans = [(int(self.begins[number]), int(self.ends[number])) for number in numbers]
            hidden = [masker.mask_row(tokens[begin:end].astype(np.int64), (VALIDATION,), begin) for begin, end in spans]
            yield masker.padded(hidden, max([1, *(end - begin for begin, end in spans)]))


def _uniform(key: tuple[int, ...], position: int, count: int) -> np.ndarray:
    """Return three numbers in [0, 1) for each of `count` positions (3, count). Each depends only on its position."""
    bits = np.random.PCG64(draw(*key))
    bits.advance(3 * position)
    return (bits.random_raw(3 * count).reshape(count, 3).T >> np.uint64(11)) * 2.0**-53
