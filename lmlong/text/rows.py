"""The rows that one source of text gives, each a pure function of its number: windows, streams or whole documents."""

from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np

from lmlong.text.packing import cut, pack
from lmlong.text.shuffle import draw, shuffled
from lmlong.text.token_file import TokenFile


class Row(NamedTuple):
    """Tokens in the order they are read, and the token after each."""

    tokens: np.ndarray  # (time,) int64
    following: np.ndarray  # (time,) int64
    starts: np.ndarray  # (time,) bool, where all that came before is forgotten


class Rows(ABC):
    """All rows of one source, without end."""

    def __init__(self, file: TokenFile, bos: int, length: int, key: tuple[int, ...]):
        self.tokens, self.bos, self.length, self.key = file.tokens, bos, length, key

    @abstractmethod
    def row(self, number: int, turn: int) -> Row:
        """A row in one turn; only streams are read in turns, all other rows come once."""

    def filled(self, number: int) -> int:
        """How many tokens a row holds."""
        return self.length

    def _between(self, start: int, end: int) -> Row:
        """The tokens from one place to another on the ring of the text."""
        found = self.tokens.take(np.arange(start, end + 1), mode="wrap").astype(np.int64)
        return Row(found[:-1], found[1:], found[:-1] == self.bos)


class Windows(Rows):
    """The text as a ring. In every epoch it is cut into windows anew, from a drawn place on, and they come in a drawn
    order; the seam between its ends is like any border between two documents."""

    def row(self, number: int, turn: int) -> Row:
        windows = len(self.tokens) // self.length
        epoch, place = divmod(number, windows)
        key = (*self.key, epoch)
        start = draw(*key) % len(self.tokens) + shuffled(place, windows, key) * self.length
        return self._between(start, start + self.length)


class Streams(Rows):
    """Each row is its own way round the ring of the text, from a drawn place on, as much further in each turn."""

    def row(self, number: int, turn: int) -> Row:
        start = draw(*self.key, number) % len(self.tokens) + turn * self.length
        return self._between(start, start + self.length)


class Documents(Rows):
    """Whole documents, packed or each in a row of its own; those longer than a row are cut. Rows that are about as full
    come together, in groups, so that what works on them at the same time has as much to do."""

    def __init__(self, file: TokenFile, bos: int, length: int, key: tuple[int, ...], group: int, packed: bool = True):
        super().__init__(file, bos, length, key)
        self.begins, self.ends = cut(file.starts, len(file.tokens), length)
        sizes = self.ends - self.begins
        # alone in its row, the end of a document that was cut just before it has nothing to tell
        rows = pack(sizes, length) if packed else list(np.flatnonzero(sizes > 1)[:, None])
        self.packed = sorted(rows, key=lambda pieces: -sizes[pieces].sum())
        self.sizes = [int(sizes[pieces].sum()) for pieces in self.packed]
        self.group = group

    def row(self, number: int, turn: int) -> Row:
        pieces = [self._between(self.begins[piece], self.ends[piece]) for piece in self.packed[self._place(number)]]
        for piece in pieces:
            piece.starts[0] = True  # the rest of a document that was cut begins without what came before it
        return Row(*map(np.concatenate, zip(*pieces, strict=True)))

    def filled(self, number: int) -> int:
        return self.sizes[self._place(number)]

    def _place(self, number: int) -> int:
        """Which of the packed rows comes at a number: the groups in a drawn order, what makes no whole group last."""
        epoch, place = divmod(number, len(self.packed))
        group, within = divmod(place, self.group)
        groups = len(self.packed) // self.group
        if group < groups:
            group = shuffled(group, groups, (*self.key, epoch))
        return group * self.group + within
