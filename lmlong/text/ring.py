"""A text as a ring in which documents begin at multiples of a factor: what is missing between them is padding."""

from typing import NamedTuple

import numpy as np


class Row(NamedTuple):
    """Tokens in the order they are read, and the token after each; padding is ends, which nothing follows."""

    tokens: np.ndarray  # (time,) int64
    following: np.ndarray  # (time,) int64
    starts: np.ndarray  # (time,) bool, where all that came before is forgotten


class Ring:
    """The first `count` tokens of a text, or all of them, whose documents begin at `starts`; after the last place comes
    the first one again."""

    def __init__(
        self, tokens: np.ndarray, starts: np.ndarray, bos: int, eos: int, factor: int = 1, count: int | None = None
    ):
        self.tokens, self.bos, self.eos, self.factor = tokens, bos, eos, factor
        self.begins = starts if len(starts) and starts[0] == 0 else np.concatenate([[0], starts])  # in the text
        self.sizes = np.diff(self.begins, append=len(tokens) if count is None else count)
        self.places = np.concatenate([[0], padded(self.sizes, factor).cumsum()])  # on the ring

    def __len__(self) -> int:
        return int(self.places[-1])

    def row(self, begin: int, end: int) -> Row:
        """What stands from one place to another."""
        places = np.arange(begin, end) % len(self)
        document = np.searchsorted(self.places, places, side="right") - 1
        within = places - self.places[document]
        return self._of(self.begins[document] + within, within < self.sizes[document])

    def piece(self, begin: int, end: int) -> Row:
        """The tokens from one place of the text to another, and padding after them."""
        at = np.arange(begin, begin + int(padded(np.array(end - begin), self.factor)))
        return self._of(at, at < end)

    def _of(self, at: np.ndarray, real: np.ndarray) -> Row:
        """The tokens at places of the text, and those after them; padding where they are not real."""
        tokens, following = (self.tokens.take(at + ahead, mode="wrap").astype(np.int64) for ahead in (0, 1))
        tokens = np.where(real, tokens, self.eos)
        return Row(tokens, following, tokens == self.bos)


def padded(sizes: np.ndarray, factor: int) -> np.ndarray:
    """Each size rounded up to a multiple of the factor."""
    return -(-sizes // factor) * factor
