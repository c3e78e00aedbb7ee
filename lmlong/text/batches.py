"""Token files -> batches. A training batch follows from its number alone, so a cursor into the data is that number."""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from lmlong.text.shuffle import draw, shuffled

IGNORED = -100  # the target that no loss counts


class Batch(NamedTuple):
    """Rows of tokens and what follows each of them."""

    tokens: np.ndarray  # (rows, time) int64
    targets: np.ndarray  # (rows, time) int64, IGNORED after the end of a document
    starts: np.ndarray  # (rows, time) bool, where a document begins


class TrainingBatches:
    """Windows of the training text without end, mixed from its sources by weight.

    Each source is a ring. In every epoch it is cut into windows anew, from a drawn place on, and they come in a drawn
    order; the seam between its ends is like any border between two documents. As `streams`, each row of the batches is
    instead one way round the ring, from a drawn place on, and a batch takes up each row where the last one left it.
    """

    def __init__(
        self,
        sources: Sequence[np.ndarray],
        weights: Sequence[float],
        bos: int,
        eos: int,
        sequence_length: int,
        batch_size: int,
        seed: int,
        streams: bool = False,
    ):
        assert all(len(tokens) > sequence_length for tokens in sources)
        self._sources = sources
        self._shares = _shares_of_the_rest(weights)
        self._bos = bos
        self._eos = eos
        self._length = sequence_length
        self._rows = batch_size
        self._seed = seed
        self._streams = streams

    def batch(self, micro_step: int, rank: int = 0, ranks: int = 1) -> Batch:
        """The rows of one rank in one forward pass; all ranks together take the same rows however many they are."""
        if self._streams:
            rows = range(rank * self._rows, (rank + 1) * self._rows)
            windows = [self._of_stream(row, micro_step) for row in rows]
        else:
            first = (micro_step * ranks + rank) * self._rows
            windows = [self._window(row) for row in range(first, first + self._rows)]
        return _batch(np.stack(windows), self._bos, self._eos)

    def _window(self, row: int) -> np.ndarray:
        """The tokens of one row and the one after them."""
        source, place = _source_of(row, self._shares)
        tokens = self._sources[source]
        windows = len(tokens) // self._length
        epoch, number = divmod(place, windows)
        key = (self._seed, source, epoch)
        return self._cut(tokens, draw(*key) % len(tokens) + shuffled(number, windows, key) * self._length)

    def _of_stream(self, row: int, number: int) -> np.ndarray:
        """As many tokens further along one row's own way round its source, which begins at a drawn place."""
        source, place = _source_of(row, self._shares)
        tokens = self._sources[source]
        return self._cut(tokens, draw(self._seed, source, place) % len(tokens) + number * self._length)

    def _cut(self, tokens: np.ndarray, start: int) -> np.ndarray:
        return tokens.take(np.arange(start, start + self._length + 1), mode="wrap").astype(np.int64)


def validation_batches(
    tokens: np.ndarray, bos: int, eos: int, length: int, rows: int, limit: int | None = None, ranks: int = 1
) -> Iterator[Batch]:
    """A text, or its first `limit` tokens, in windows: each token but the first is a target exactly once.

    Batches without targets make their number a multiple of `ranks`, so that each rank can take as many as the others.
    """
    tokens = tokens[:limit]
    length = min(length, max(len(tokens) - 1, 1))
    starts = range(0, len(tokens) - 1, length)
    missing = -(-len(starts) // rows) % -ranks
    for first in range(0, len(starts) - missing * rows, rows):
        windows = np.full((max(len(starts[first : first + rows]), 1), length + 1), IGNORED, dtype=np.int64)
        for window, start in zip(windows, starts[first:], strict=False):
            text = tokens[start : start + length + 1]
            window[: len(text)] = text
        yield _batch(windows, bos, eos)


def _batch(windows: np.ndarray, bos: int, eos: int) -> Batch:
    """Windows of time + 1 tokens, padded with IGNORED, as inputs and targets; padded inputs are further ends."""
    tokens, targets = windows[:, :-1], windows[:, 1:]
    tokens = np.where(tokens == IGNORED, eos, tokens)
    return Batch(tokens, np.where(tokens == eos, IGNORED, targets), tokens == bos)


def _shares_of_the_rest(weights: Sequence[float]) -> list[Fraction]:
    """Each source's share of the rows that the sources before it leave; exact, so that no row is counted twice."""
    exact = [Fraction(weight) for weight in weights]
    return [weight / sum(exact[number:]) for number, weight in enumerate(exact)]


def _source_of(row: int, shares: list[Fraction]) -> tuple[int, int]:
    """Which source gives a row, and how many rows it gave before; every source keeps to its share all along."""
    for source, share in enumerate(shares):
        before = int(row * share)
        if int((row + 1) * share) > before:
            return source, before
        row -= before
    raise AssertionError("the last source takes all that is left")
