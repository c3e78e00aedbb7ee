"""The rows of one source of text, each a pure function of its number: windows, streams or whole documents."""

from abc import ABC, abstractmethod

import numpy as np

from lmlong.data.cyclic_tokens import CyclicTokens, Row, round_up
from lmlong.data.packing import cut, pack
from lmlong.data.shuffle import draw, shuffled


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
        self.begins, self.ends = cut(text.begins, len(text.tokens), length)
        sizes = round_up(self.ends - self.begins, text.factor)
        # a piece of one token, the last of a cut document, has no target if it is alone in a row
        rows = pack(sizes, length) if packed else list(np.flatnonzero(sizes > 1)[:, None])
        self.packed = sorted(rows, key=lambda pieces: -sizes[pieces].sum())
        self.sizes = [int(sizes[pieces].sum()) for pieces in self.packed]
        self.group = group

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
