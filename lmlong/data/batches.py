"""Batches from token files. A training batch depends only on its number, so the number is the position in the data."""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import islice
from typing import NamedTuple

import numpy as np

from lmlong.data.rows import IGNORED, CyclicTokens, Row, Rows
from lmlong.recipe.text import ROW_LENGTHS, SHORT_PARTS

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]
"""A batch of any objective: tokens, targets, and a mask of document starts or padding, each (rows, time)."""


class CausalBatch(NamedTuple):
    """Rows of tokens and the next token of each."""

    tokens: np.ndarray  # (rows, time) int64
    targets: np.ndarray  # (rows, time) int64, IGNORED after the end of a document
    document_starts: np.ndarray  # (rows, time) bool, whether a document begins


class TrainingBatches:
    """Endless batches of the training text, mixed from its sources by weight.

    All ranks together take the same rows, whatever their number, in batches of the same length. With `streams`, each
    row of a batch continues the same row of the previous batch. The first `short_rows` rows are read in parts: the
    first part of each, then the second of each, and so on.
    """

    def __init__(
        self,
        sources: Sequence[Rows],
        weights: Sequence[float],
        eos: int,
        batch_size: int,
        streams: bool = False,
        short_rows: int = 0,
    ):
        self._sources = sources
        self._shares = _shares_of_rest(weights)
        self._eos = eos
        self._rows = batch_size
        self._streams = streams
        self._short_rows = short_rows

    def batch(self, micro_step: int, rank: int = 0, ranks: int = 1) -> Arrays:
        """Return the rows of one rank in one forward pass."""
        own, length = self._numbers(micro_step, ranks), self.length(micro_step, ranks)
        own = own[rank * self._rows : (rank + 1) * self._rows]
        if own.start < self._short_rows:
            numbers = range(SHORT_PARTS * own.start, SHORT_PARTS * own.stop)
            parts = [self._part(number, length // SHORT_PARTS) for number in numbers]
            return self.collate(parts, numbers.start, length // SHORT_PARTS)
        return self.collate([self._row(number, micro_step) for number in own], own.start, length)

    def _part(self, number: int, length: int) -> Row:
        """Return a part of one of the first rows: all first parts are numbered before all second parts."""
        part, row = divmod(number, self._short_rows)
        return Row(*(x[part * length : (part + 1) * length] for x in self._row(row, turn=0)))

    def _row(self, number: int, turn: int) -> Row:
        source, number_in_source = _source_of(number, self._shares)
        return self._sources[source].row(number_in_source, turn)

    def length(self, micro_step: int, ranks: int = 1) -> int:
        """Return the padded length of the rows of a forward pass, one of a few, without reading them; of rows in parts,
        their whole length."""
        sources = [_source_of(number, self._shares) for number in self._numbers(micro_step, ranks)]
        filled = max(self._sources[source].filled(number) for source, number in sources)
        length = max(source.length for source in self._sources)
        factor = self._sources[0].text.factor
        step = -(-length // (ROW_LENGTHS * factor)) * factor
        return min(-(-filled // step) * step, length)

    def _numbers(self, micro_step: int, ranks: int) -> range:
        """Return the numbers of the rows of all ranks in one forward pass."""
        first = 0 if self._streams else micro_step * ranks * self._rows
        return range(first, first + ranks * self._rows)

    def collate(self, rows: Sequence[Row], first: int, time: int) -> Arrays:
        """Return rows as a batch of length `time`. `first` is the number of its first row among all rows."""
        return _causal_batch(rows, time, self._eos)


def scored_tokens(tokens: np.ndarray, bos: int, eos: int, factor: int = 1) -> CyclicTokens:
    """Return all tokens of a text that have a next token. Documents begin at multiples of `factor`."""
    candidates = np.flatnonzero(tokens == bos)
    starts = candidates[tokens.take(candidates + 1, mode="wrap") != bos]
    return CyclicTokens(tokens, starts, bos, eos, factor, count=max(len(tokens) - 1, 0))


def validation_batches(
    text: CyclicTokens, length: int, rows: int, limit: int | None = None, ranks: int = 1
) -> Iterator[CausalBatch]:
    """Yield a text, or an even sample of `limit` tokens, in batches of windows. Each token but the first is a target
    exactly once.

    Batches without targets are added until their number is a multiple of `ranks`, so that all ranks have equally many.
    """
    length = min(length, max(len(text), 1))
    starts: Sequence[int] = range(0, len(text), length)
    if limit is not None and limit < len(text):
        length = min(length, -(-limit // text.factor) * text.factor)
        starts = [starts[n] for n in evenly(len(starts), limit // length)]
    for numbers in in_batches(len(starts), rows, ranks):
        windows = [text.row(starts[n], min(starts[n] + length, len(text))) for n in numbers]
        yield _causal_batch(windows, length, text.eos)


VALIDATION_STREAMS = 8
"""Parts of a validation text that are each read with one state, whatever the batch size of a run."""


def validation_streams(
    text: CyclicTokens, length: int, rows: int, limit: int | None = None, rank: int = 0, ranks: int = 1
) -> Iterator[CausalBatch]:
    """Yield one rank's batches of a text, to be scored with the state passed from batch to batch. The text is read in
    VALIDATION_STREAMS equal parts, or, with `limit`, in the beginnings of these parts, of `limit` tokens together. The
    state is reset at the beginning of a part.

    All ranks have equally many batches, with equally many rows.
    """
    factor = text.factor
    part = -(-len(text) // (VALIDATION_STREAMS * factor)) * factor
    read = part if limit is None else min(part, max(limit // (VALIDATION_STREAMS * factor), 1) * factor)
    rows = min(rows, VALIDATION_STREAMS)
    for numbers in islice(in_batches(VALIDATION_STREAMS, rows, ranks), rank, None, ranks):
        spans = [(number * part, min(number * part + read, len(text))) for number in numbers]
        spans += [(0, 0)] * (rows - len(spans))
        for at in range(0, read, length):
            inside = [(min(begin + at, end), min(begin + at + length, end)) for begin, end in spans]
            batch = _causal_batch([text.row(*span) for span in inside], length, text.eos)
            batch.document_starts[:, 0] |= at == 0
            yield batch


def evenly(count: int, size: int) -> list[int]:
    """Return `size` evenly spaced numbers of range(count), at least one."""
    size = min(max(size, 1), count)
    return [(2 * number + 1) * count // (2 * size) for number in range(size)]


def streams_of_each(weights: Sequence[float], rows: int) -> list[int]:
    """Return how many rows each source provides of a batch of all ranks together."""
    shares = _shares_of_rest(weights)
    sources = [_source_of(row, shares)[0] for row in range(rows)]
    return [sources.count(source) for source in range(len(weights))]


def in_batches(count: int, rows: int, ranks: int) -> Iterator[range]:
    """Yield range(count), `rows` at a time. Empty ranges are added until their number is a multiple of `ranks`."""
    missing = -(-count // rows) % -ranks
    for first in range(0, count - missing * rows, rows):
        yield range(min(first, count), min(first + rows, count))


def pad(rows: Sequence[Sequence[np.ndarray]], time: int, fills: Sequence[int | bool]) -> list[np.ndarray]:
    """Return each part of the rows, such as the tokens, as an array (rows, time) that is filled up with one of `fills`.
    No rows become one row of padding."""
    arrays = [np.full((max(len(rows), 1), time), fill) for fill in fills]
    for number, row in enumerate(rows):
        for array, part in zip(arrays, row, strict=True):
            array[number, : len(part)] = part
    return arrays


def _causal_batch(rows: Sequence[Row], time: int, eos: int) -> CausalBatch:
    return CausalBatch(*pad(rows, time, (eos, IGNORED, False)))


def _shares_of_rest(weights: Sequence[float]) -> list[Fraction]:
    """Return each source's share of the rows that the sources before it leave. Exact fractions, so that no row is
    counted twice."""
    exact = [Fraction(weight) for weight in weights]
    return [weight / sum(exact[number:]) for number, weight in enumerate(exact)]


def _source_of(row: int, shares: list[Fraction]) -> tuple[int, int]:
    """Return the source of a row, and how many earlier rows have the same source. The shares hold at every point of a
    run."""
    for source, share in enumerate(shares):
        before = int(row * share)
        if int((row + 1) * share) > before:
            return source, before
        row -= before
    raise AssertionError("the last source takes all remaining rows")
