"""Which tokens of a text are hidden from an encoder, and what is shown in their place: pure functions, so that there is
nothing to save, and the same place of a text is hidden in every run, every validation and every model."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from lmlong import recipe
from lmlong.text.batches import IGNORED, TrainingBatches, in_batches
from lmlong.text.packing import cut
from lmlong.text.rows import Row, Rows
from lmlong.text.shuffle import draw
from lmlong.text.token_file import TokenFile
from lmlong.text.tokenizer import Tokenizer

SHOWN = {"bert": (0.8, 0.9), "plain": (1.0, 1.0)}
"""Shares of the hidden tokens that are shown as a mask, and as a mask or a random token; the rest is shown as it is."""

VALIDATION = 0
"""What the hidden places of a validation text follow from, whatever the seed of a run is."""


class MaskedBatch(NamedTuple):
    """Rows of tokens, some of them hidden."""

    tokens: np.ndarray  # (rows, time) int64, as they are shown
    targets: np.ndarray  # (rows, time) int64, what was hidden, IGNORED elsewhere
    padding: np.ndarray  # (rows, time) bool, where a row has no token


class Hidden(NamedTuple):
    """One row."""

    tokens: np.ndarray  # (time,) int64, as they are shown
    targets: np.ndarray  # (time,) int64


class Masker:
    """Hides tokens of a text, but never the ends of documents; the mask is the number after the vocabulary's last."""

    def __init__(self, options: recipe.Masking, tokenizer: Tokenizer):
        self.share = options.share
        self.as_mask, self.as_mask_or_random = SHOWN[options.kind]
        self.mask, self.eos = tokenizer.vocabulary, tokenizer.eos
        self.ends = [tokenizer.bos, tokenizer.eos]
        self.words = np.setdiff1d(np.arange(tokenizer.vocabulary), self.ends)

    def hide(self, tokens: np.ndarray, key: tuple[int, ...], place: int = 0) -> Hidden:
        """Tokens that stand from a place on in a text, whose hidden places all follow from its key."""
        chance, fate, word = _uniform(key, place, len(tokens))
        can_be = ~np.isin(tokens, self.ends)
        chosen = can_be & (chance < self.share)
        if can_be.any() and not chosen.any():  # or a row of few tokens would teach nothing
            chosen[np.where(can_be, chance, 1).argmin()] = True
        random = self.words[(word * len(self.words)).astype(np.int64)]
        shown = np.where(fate < self.as_mask, self.mask, np.where(fate < self.as_mask_or_random, random, tokens))
        return Hidden(np.where(chosen, shown, tokens), np.where(chosen, tokens, IGNORED))

    def padded(self, rows: Sequence[Hidden], time: int) -> MaskedBatch:
        """Rows side by side."""
        tokens = np.full((len(rows), time), self.eos, dtype=np.int64)
        targets = np.full((len(rows), time), IGNORED, dtype=np.int64)
        padding = np.ones((len(rows), time), dtype=np.bool_)
        for number, row in enumerate(rows):
            filled = len(row.tokens)
            tokens[number, :filled], targets[number, :filled], padding[number, :filled] = *row, False
        return MaskedBatch(tokens, targets, padding)


class MaskedBatches(TrainingBatches):
    """Training batches with tokens hidden in each row, by the number of the row, so that ranks and resumes agree."""

    def __init__(self, sources: Sequence[Rows], weights: Sequence[float], masker: Masker, batch_size: int, seed: int):
        super().__init__(sources, weights, masker.eos, batch_size)
        self._masker, self._seed = masker, seed

    def side_by_side(self, rows: Sequence[Row], first: int, time: int) -> MaskedBatch:
        hidden = [self._masker.hide(row.tokens, (self._seed, first + number)) for number, row in enumerate(rows)]
        return self._masker.padded(hidden, time)


class Pieces(NamedTuple):
    """Parts of a text that are read by themselves, the longest first."""

    begins: np.ndarray  # (pieces,)
    ends: np.ndarray  # (pieces,)

    @staticmethod
    def of(text: TokenFile, length: int, whole_documents: bool) -> "Pieces":
        """Windows of a length, or whole documents, cut where longer."""
        if whole_documents:
            begins, ends = cut(text.starts, len(text.tokens), length)
        else:
            begins = np.arange(0, len(text.tokens), length)
            ends = np.minimum(begins + length, len(text.tokens))
        order = np.argsort(begins - ends, kind="stable")
        return Pieces(begins[order], ends[order])

    def batches(self, tokens: np.ndarray, masker: Masker, rows: int, ranks: int = 1) -> Iterator[MaskedBatch]:
        """All pieces in turn; batches without a token make their number a multiple of `ranks`."""
        for numbers in in_batches(len(self.begins), rows, ranks):
            spans = [(int(self.begins[number]), int(self.ends[number])) for number in numbers]
            hidden = [masker.hide(tokens[begin:end].astype(np.int64), (VALIDATION,), begin) for begin, end in spans]
            nothing = [Hidden(np.zeros(0, np.int64), np.zeros(0, np.int64))]
            yield masker.padded(hidden or nothing, max([1, *(end - begin for begin, end in spans)]))


def _uniform(key: tuple[int, ...], place: int, count: int) -> np.ndarray:
    """Three numbers in [0, 1) for each of so many places (3, count), the same whatever other places are asked for."""
    bits = np.random.PCG64(draw(*key))
    bits.advance(3 * place)
    return (bits.random_raw(3 * count).reshape(count, 3).T >> np.uint64(11)) * 2.0**-53
