"""Token files -> batches. A training batch depends on its number alone, so that number is the position in the data."""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from lmlong.data.cyclic_tokens import CyclicTokens, Row
from lmlong.data.rows import Rows

IGNORED = -100  # a target that no loss counts

MAX_LENGTHS = 16
"""Number of different lengths that batches may have, so that memory and compiled code are reused."""


Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]
"""A batch of any objective: tokens, targets, and a mask of document starts or padding, each (rows, time)."""


class CausalBatch(NamedTuple):
    """Rows of tokens and the next token of each."""

    tokens: np.ndarray  # (rows, time) int64
    targets: np.ndarray  # (rows, time) int64, IGNORED after the end of a document
    document_starts: np.ndarray  # (rows, time) bool, true where a document begins


class TrainingBatches:
    """Endless batches of the training text, mixed from its sources by weight.

    All ranks together take the same rows whatever their number, in batches of the same length. With `streams`, each row
    of a batch continues the same row of the batch before.
    """

    def __init__(
        self, sources: Sequence[Rows], weights: Sequence[float], eos: int, batch_size: int, streams: bool = False
    ):
        self._sources = sources
        self._shares = _shares_of_rest(weights)
        self._eos = eos
        self._rows = batch_size
        self._streams = streams

    def batch(self, micro_step: int, rank: int = 0, ranks: int = 1) -> Arrays:
        """Return the rows of one rank in one forward pass."""
        first, turn = (0, micro_step) if self._streams else (micro_step * ranks * self._rows, 0)
        taken = [_source_of(row, self._shares) for row in range(first, first + ranks * self._rows)]
        time = self._time(max(self._sources[source].filled(number) for source, number in taken))
        own = taken[rank * self._rows : (rank + 1) * self._rows]
        rows = [self._sources[source].row(number, turn) for source, number in own]
        return self.collate(rows, first + rank * self._rows, time)

    def collate(self, rows: Sequence[Row], first: int, time: int) -> Arrays:
        """Return rows as a batch of length `time`; `first` is the number of its first row among all rows."""
        return _padded(rows, time, self._eos)

    def _time(self, filled: int) -> int:
        """Return one of a few lengths, one that `filled` tokens fit into."""
        length = max(source.length for source in self._sources)
        factor = self._sources[0].text.factor
        step = -(-length // (MAX_LENGTHS * factor)) * factor
        return min(-(-filled // step) * step, length)


def validation_batches(
    tokens: np.ndarray,
    bos: int,
    eos: int,
    length: int,
    rows: int,
    limit: int | None = None,
    ranks: int = 1,
    factor: int = 1,
) -> Iterator[CausalBatch]:
    """Iterate over a text, or its first `limit` tokens, in windows: each token but the first is a target exactly once.
    Documents begin at multiples of `factor`.

    Batches without targets are added until their number is a multiple of `ranks`, so that each rank takes as many.
    """
    tokens = tokens[:limit]
    text = CyclicTokens(tokens, np.flatnonzero(tokens == bos), bos, eos, factor, count=max(len(tokens) - 1, 0))
    length = min(length, max(len(text), 1))
    starts = range(0, len(text), length)
    for numbers in in_batches(len(starts), rows, ranks):
        windows = [text.row(starts[n], min(starts[n] + length, len(text))) for n in numbers]
        yield _padded(windows, length, eos)


def in_batches(count: int, rows: int, ranks: int) -> Iterator[range]:
    """Iterate over range(count), `rows` at a time; empty ranges make their number a multiple of `ranks`."""
    missing = -(-count // rows) % -ranks
    for first in range(0, count - missing * rows, rows):
        yield range(min(first, count), min(first + rows, count))


def _padded(rows: Sequence[Row], time: int, eos: int) -> CausalBatch:
    """Return rows as inputs and targets, padded to `time` with eos, which has no target."""
    shape = (max(len(rows), 1), time)
    tokens = np.full(shape, eos, dtype=np.int64)
    targets = np.full(shape, IGNORED, dtype=np.int64)
    document_starts = np.zeros(shape, dtype=np.bool_)
    for number, row in enumerate(rows):
        filled = len(row.tokens)
        tokens[number, :filled], targets[number, :filled], document_starts[number, :filled] = row
    return CausalBatch(tokens, np.where(tokens == eos, IGNORED, targets), document_starts)


def _shares_of_rest(weights: Sequence[float]) -> list[Fraction]:
    """Return each source's share of the rows left by the sources before it; exact, so that no row is counted twice."""
    exact = [Fraction(weight) for weight in weights]
    return [weight / sum(exact[number:]) for number, weight in enumerate(exact)]


def _source_of(row: int, shares: list[Fraction]) -> tuple[int, int]:
    """Return the source of a row, and how many rows that source gave before; shares hold at every point of a run."""
    for source, share in enumerate(shares):
        before = int(row * share)
        if int((row + 1) * share) > before:
            return source, before
        row -= before
    raise AssertionError("the last source takes all that is left")
