"""The rows of one source of text, each a pure function of its number: windows, streams or whole documents.

The text is a cycle in which documents begin at multiples of a factor, with padding between them. bos and eos may be the
same token, as in many models. It ends a document if the same token follows, otherwise it begins one.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections import defaultdict
from typing import NamedTuple

import numpy as np

from lmlong.data.shuffle import draw, shuffled

IGNORED = -100
"""The target of the last token of a document, and of padding: there is nothing to predict."""


class Row(NamedTuple):
    """Tokens in reading order, and the next token of each as its target. Padding is eos."""

    tokens: np.ndarray  # (time,) int64
    targets: np.ndarray  # (time,) int64, IGNORED at the end of a document
    document_starts: np.ndarray  # (time,) bool, whether the state is reset


class CyclicTokens:
    """The first `count` tokens of a text, or all, as a cycle: the first follows the last. `starts`: the positions of
    its documents."""

    def __init__(
        self, tokens: np.ndarray, starts: np.ndarray, bos: int, eos: int, factor: int = 1, count: int | None = None
    ):
        self.tokens, self.bos, self.eos, self.factor = tokens, bos, eos, factor
        self.begins = starts if len(starts) and starts[0] == 0 else np.concatenate([[0], starts])  # in the text
        self.sizes = np.diff(self.begins, append=len(tokens) if count is None else count)
        self.offsets = np.concatenate([[0], round_up(self.sizes, factor).cumsum()])  # of the documents in the cycle

    def __len__(self) -> int:
        return int(self.offsets[-1])

    def row(self, begin: int, end: int) -> Row:
        """Return the row from one position in the cycle to another."""
        positions = np.arange(begin, end) % len(self)
        document = np.searchsorted(self.offsets, positions, side="right") - 1
        within = positions - self.offsets[document]
        return self._row_at(self.begins[document] + within, within < self.sizes[document])

    def piece(self, begin: int, end: int) -> Row:
        """Return the tokens from one position in the text to another, padded to a multiple of the factor."""
        at = np.arange(begin, begin + int(round_up(np.array(end - begin), self.factor)))
        return self._row_at(at, at < end)

    def _row_at(self, at: np.ndarray, real: np.ndarray) -> Row:
        """Return the tokens at positions in the text, with their targets, and padding if `real` is False."""
        tokens, targets = (self.tokens.take(at + ahead, mode="wrap").astype(np.int64) for ahead in (0, 1))
        tokens = np.where(real, tokens, self.eos)
        ends = ~real | (tokens == self.eos) & (targets == self.bos)
        return Row(tokens, np.where(ends, IGNORED, targets), real & ~ends & (tokens == self.bos))


def round_up(sizes: np.ndarray, factor: int) -> np.ndarray:
    """Return each size rounded up to a multiple of the factor."""
    return -(-sizes // factor) * factor


class Rows(ABC):
    """The endless rows of one source."""

    def __init__(self, text: CyclicTokens, length: int, key: tuple[int, ...]):
        self.text, self.length, self.key = text, length, key

    @abstractmethod
    def row(self, number: int, turn: int) -> Row:
        """Return the row with this number; only streams use `turn`, all other rows come once."""

    def filled(self, number: int) -> int:
        """Return how many tokens a row holds."""
        return self.length

    def _random_begin(self, *key: int) -> int:
        """Return a random position at which a document might begin."""
        return draw(*key) % len(self.text) // self.text.factor * self.text.factor


class Windows(Rows):
    """Windows of the text. Every epoch cuts its cycle from a new random position, and shuffles the windows. The seam of
    the cycle is an ordinary document boundary."""

    def row(self, number: int, turn: int) -> Row:
        windows = len(self.text) // self.length
        epoch, index = divmod(number, windows)
        key = (*self.key, epoch)
        begin = self._random_begin(*key) + shuffled(index, windows, key) * self.length
        return self.text.row(begin, begin + self.length)


class Streams(Rows):
    """Streams around the cycle of the text, each of which advances by one row in each turn. They begin at evenly spaced
    positions, the first a random one, so that every part of the text is read before any is read again."""

    def __init__(self, text: CyclicTokens, length: int, key: tuple[int, ...], streams: int):
        super().__init__(text, length, key)
        self.streams = streams

    def row(self, number: int, turn: int) -> Row:
        blocks = len(self.text) // self.text.factor
        begin = self._random_begin(*self.key) + number * blocks // self.streams * self.text.factor
        begin += turn * self.length
        return self.text.row(begin, begin + self.length)


class Documents(Rows):
    """Whole documents, packed or one in each row. Documents longer than a row are cut. Rows of similar size are
    grouped, so that ranks that work at the same time have equal work."""

    def __init__(self, text: CyclicTokens, length: int, key: tuple[int, ...], group: int, packed: bool = True):
        super().__init__(text, length, key)
        self.begins, self.ends = self._pieces()
        sizes = round_up(self.ends - self.begins, text.factor)
        # a piece of one token, the last of a cut document, has no target if it is alone in a row
        rows = pack(sizes, length) if packed else list(np.flatnonzero(sizes > 1)[:, None])
        self.packed = sorted(rows, key=lambda pieces: -sizes[pieces].sum())
        self.sizes = [int(sizes[pieces].sum()) for pieces in self.packed]
        self.group = group

    def _pieces(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the begins and ends of the pieces of documents."""
        return cut(self.text.begins, len(self.text.tokens), self.length)

    def row(self, number: int, turn: int) -> Row:
        pieces = [self.text.piece(self.begins[piece], self.ends[piece]) for piece in self.packed[self._index(number)]]
        for piece in pieces:
            piece.document_starts[0] = True  # the rest of a cut document begins with an empty state
        return Row(*map(np.concatenate, zip(*pieces, strict=True)))

    def filled(self, number: int) -> int:
        return self.sizes[self._index(number)]

    def _index(self, number: int) -> int:
        """Return the index of the packed row with this number: groups in random order, an incomplete one last."""
        epoch, index = divmod(number, len(self.packed))
        group, within = divmod(index, self.group)
        groups = len(self.packed) // self.group
        if group < groups:
            group = shuffled(group, groups, (*self.key, epoch))
        return group * self.group + within


def cut(starts: np.ndarray, total: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the begins and ends of the documents that begin at `starts`, cut into pieces of at most `length`."""
    sizes = np.diff(starts, append=total)
    pieces = -(-sizes // length)
    # the index of each piece within its document
    within = np.arange(pieces.sum()) - np.repeat(pieces.cumsum() - pieces, pieces)
    begins = np.repeat(starts, pieces) + within * length
    return begins, np.minimum(begins + length, np.repeat(starts + sizes, pieces))


def pack(sizes: np.ndarray, length: int) -> list[np.ndarray]:
    """Return the indices of the pieces in each row: best-fit decreasing, each into the fullest row that has room."""
    rows: list[list[int]] = []
    roomy: defaultdict[int, list[int]] = defaultdict(list)  # rows by the room they have left
    rooms: list[int] = []  # the different amounts of room there are, in order
    for piece in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[piece])
        index = bisect_left(rooms, size)
        if index == len(rooms):
            rows.append([])
            row, room = len(rows) - 1, length
        else:
            room = rooms[index]
            row = roomy[room].pop()
            if not roomy[room]:
                del rooms[index]
        rows[row].append(piece)
        if left := room - size:
            if not roomy[left]:
                insort(rooms, left)
            roomy[left].append(row)
    return [np.array(row) for row in rows]
