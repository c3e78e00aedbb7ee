"""Token files -> batches. A training batch follows from its number alone, so a cursor into the data is that number."""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from lmlong.text.rows import Row, Rows

IGNORED = -100  # the target that no loss counts

SHAPES = 16
"""How many different lengths batches may have, so that memory and compiled code are used again."""


Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]
"""A batch of any objective: tokens, targets, and marks of a meaning of its own, each (rows, time)."""


class Batch(NamedTuple):
    """Rows of tokens and what follows each of them."""

    tokens: np.ndarray  # (rows, time) int64
    targets: np.ndarray  # (rows, time) int64, IGNORED after the end of a document
    starts: np.ndarray  # (rows, time) bool, where a document begins


class TrainingBatches:
    """Batches of the training text without end, mixed from its sources by weight.

    All ranks together take the same rows however many they are, and batches of the same length. As `streams`, the
    rows of a batch are instead those of the batch before, read on.
    """

    def __init__(
        self, sources: Sequence[Rows], weights: Sequence[float], eos: int, batch_size: int, streams: bool = False
    ):
        self._sources = sources
        self._shares = _shares_of_the_rest(weights)
        self._eos = eos
        self._rows = batch_size
        self._streams = streams

    def batch(self, micro_step: int, rank: int = 0, ranks: int = 1) -> Arrays:
        """The rows of one rank in one forward pass."""
        first, turn = (0, micro_step) if self._streams else (micro_step * ranks * self._rows, 0)
        taken = [_source_of(row, self._shares) for row in range(first, first + ranks * self._rows)]
        time = self._time(max(self._sources[source].filled(number) for source, number in taken))
        own = taken[rank * self._rows : (rank + 1) * self._rows]
        rows = [self._sources[source].row(number, turn) for source, number in own]
        return self.side_by_side(rows, first + rank * self._rows, time)

    def side_by_side(self, rows: Sequence[Row], first: int, time: int) -> Arrays:
        """Rows, of which the first is that of a number among all rows, as a batch of a length."""
        return _padded(rows, time, self._eos)

    def _time(self, filled: int) -> int:
        """A length that so many tokens fit into, one of a few."""
        length = max(source.length for source in self._sources)
        step = -(-length // SHAPES)
        return min(-(-filled // step) * step, length)


def validation_batches(
    tokens: np.ndarray, bos: int, eos: int, length: int, rows: int, limit: int | None = None, ranks: int = 1
) -> Iterator[Batch]:
    """A text, or its first `limit` tokens, in windows: each token but the first is a target exactly once.

    Batches without targets make their number a multiple of `ranks`, so that each rank can take as many as the others.
    """
    tokens = tokens[:limit]
    length = min(length, max(len(tokens) - 1, 1))
    starts = range(0, len(tokens) - 1, length)
    for numbers in in_batches(len(starts), rows, ranks):
        texts = [tokens[starts[n] : starts[n] + length + 1].astype(np.int64) for n in numbers]
        windows = [Row(text[:-1], text[1:], text[:-1] == bos) for text in texts or [np.zeros(1, np.int64)]]
        yield _padded(windows, length, eos)


def in_batches(count: int, rows: int, ranks: int) -> Iterator[range]:
    """So many numbers, `rows` at a time; empty ones make how often a multiple of `ranks`."""
    missing = -(-count // rows) % -ranks
    for first in range(0, count - missing * rows, rows):
        yield range(min(first, count), min(first + rows, count))


def _padded(rows: Sequence[Row], time: int, eos: int) -> Batch:
    """Rows as inputs and targets; where a row is shorter than `time`, further ends that nothing follows."""
    tokens = np.full((len(rows), time), eos, dtype=np.int64)
    targets = np.full((len(rows), time), IGNORED, dtype=np.int64)
    starts = np.zeros((len(rows), time), dtype=np.bool_)
    for number, row in enumerate(rows):
        filled = len(row.tokens)
        tokens[number, :filled], targets[number, :filled], starts[number, :filled] = row
    return Batch(tokens, np.where(tokens == eos, IGNORED, targets), starts)


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
