"""How much of a prompt has been read."""

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

SECONDS = 0.2
"""Time between two reports."""


class Progress(NamedTuple):
    """How much of a prompt has been read, in bytes of its text."""

    read: int
    total: int


class ReadingProgress:
    """Estimates the text that has been read from the number of tokens, since text is encoded before it is read."""

    def __init__(self, text: str, token_bytes: np.ndarray, known: Sequence[int] = ()):
        """`known` are tokens that need not be read."""
        self._total = len(text.encode("utf-8", "surrogatepass"))
        self._token_bytes = token_bytes
        self._known = self._bytes_of(known)
        self._tokens = self._bytes = 0
        self._next = time.monotonic() + SECONDS

    def counted(self, pieces: Iterable[Sequence[int]]) -> Iterator[Sequence[int]]:
        """Iterate over pieces of tokens, and count them."""
        for tokens in pieces:
            self._tokens += len(tokens)
            self._bytes += self._bytes_of(tokens)
            yield tokens

    def _bytes_of(self, tokens: Sequence[int]) -> int:
        return int(self._token_bytes[np.array(tokens, np.int64)].sum())

    def after(self, tokens: int) -> Progress | None:
        """Return the progress after reading so many tokens, or None if the last report was a moment ago."""
        if time.monotonic() < self._next:
            return None
        self._next = time.monotonic() + SECONDS
        read = self._known + self._bytes * tokens // max(1, self._tokens)
        return Progress(min(read, self._total), self._total)
