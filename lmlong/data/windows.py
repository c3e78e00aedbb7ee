"""The 50-byte windows of documents, and which of them occur in other text, in bounded memory and linear time.

A window is identified by a 64-bit hash. Of many windows a uniform sample is kept. The hash decides, so every occurrence
of a window is in the sample or none.
"""

from collections.abc import Iterable, Iterator
from itertools import pairwise

import numpy as np

from lmlong.data.text_info import Overlap
from lmlong.data.token_file import TokenFile
from lmlong.data.tokenizers.base import Tokenizer

WINDOW = 50
"""Bytes: long enough that two texts share a window only if text was copied or both follow a template."""

MAX_WINDOWS = 1 << 20
"""Windows that are kept; up to twice as many while documents are added."""

BLOCK = 1 << 13
"""Bytes that are hashed at once. The allocator does not reuse larger arrays, which takes three times as long."""

PIECE = 1 << 15
"""Tokens that are decoded at once."""

FACTOR = 0x9E3779B97F4A7C15
"""Odd, so that it has an inverse modulo 2^64."""

Texts = Iterable[tuple[int, Iterable[bytes]]]
"""Documents as a number and pieces of text."""


def _powers(factor: int) -> np.ndarray:
    powers = np.full(BLOCK, factor, np.uint64)
    powers[0] = 1
    return np.multiply.accumulate(powers)


POWERS, INVERSE_POWERS = _powers(FACTOR), _powers(pow(FACTOR, -1, 1 << 64))


def window_hashes(texts: Texts, step: int = 1) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the hashes (windows,) of all windows, with the number of each one's document. Only hashes that are
    multiples of `step`, a power of two, are included. Windows do not cross document boundaries."""
    data, begins, numbers = bytearray(), [], []
    for number, pieces in texts:
        begins.append(len(data))
        numbers.append(number)
        for piece in pieces:
            data += piece
            while len(data) >= BLOCK:
                yield _hashes(data[:BLOCK], begins, numbers, step)
                done = BLOCK - WINDOW + 1
                del data[:done]
                ended = sum(begin <= done for begin in begins) - 1  # documents before the one that `data` begins with
                begins, numbers = [max(begin - done, 0) for begin in begins[ended:]], numbers[ended:]
    yield _hashes(data, begins, numbers, step)


def _hashes(data: bytearray, begins: list[int], numbers: list[int], step: int) -> tuple[np.ndarray, np.ndarray]:
    if len(data) < WINDOW:
        return np.zeros(0, np.uint64), np.zeros(0, np.int32)
    # prefix sums of byte i * FACTOR^i; the difference of two, scaled, depends only on the window
    sums = np.zeros(len(data) + 1, np.uint64)
    np.cumsum(np.frombuffer(bytes(data), np.uint8) * POWERS[: len(data)], out=sums[1:])
    hashes = sums[WINDOW:] - sums[:-WINDOW]
    hashes *= INVERSE_POWERS[: len(hashes)]
    hashes ^= hashes >> np.uint64(29)
    hashes *= np.uint64(0xBF58476D1CE4E5B9)
    hashes ^= hashes >> np.uint64(32)
    begin = np.flatnonzero(hashes & np.uint64(step - 1) == 0) if step > 1 else np.arange(len(hashes))
    ends = np.array([*begins[1:], len(data)])
    document = np.searchsorted(ends, begin, "right")
    whole = begin + WINDOW <= ends[document]
    return hashes[begin[whole]], np.array(numbers, np.int32)[document[whole]]


class WindowSample:
    """The windows of numbered documents. `add` all documents, then `find` them in other text."""

    def __init__(self, most: int = MAX_WINDOWS):
        self._most = most
        self._step = 1  # hashes that are its multiples are kept
        self._kept: list[tuple[np.ndarray, np.ndarray]] = []
        self._size = 0

    def add(self, documents: Texts) -> None:
        """Keep the windows of documents."""
        for hashes, numbers in window_hashes(documents):
            self._keep(hashes, numbers)
            if self._size > 2 * self._most:
                self._thin(self._most)
        self._thin(self._most)
        parts = zip(*self._kept, strict=True)
        hashes, self.document = (np.concatenate(part) for part in parts)
        self._known = np.sort(hashes)
        self._known = self._known[np.diff(self._known, prepend=~self._known[:1]) != 0]
        self._index = np.searchsorted(self._known, hashes)
        self._seen = np.zeros(len(self._known), bool)
        slots = 1 << max(16, (8 * len(self._known)).bit_length())
        self._mask = np.uint64(slots - 1)
        self._filter = np.zeros(slots, bool)
        self._filter[self._slot(self._known)] = True

    def find(self, texts: Iterable[Iterable[bytes]]) -> None:
        """Mark the windows that occur in these texts."""
        for hashes, _ in window_hashes(((0, pieces) for pieces in texts), self._step):
            hashes = hashes[self._filter[self._slot(hashes)]]
            index = np.searchsorted(self._known, hashes)
            index[index == len(self._known)] = 0
            self._seen[index[self._known[index] == hashes]] = True

    def mark(self, documents: np.ndarray) -> None:
        """Mark the windows of some documents, given as a mask, as if they were found."""
        self._seen[self._index[documents[self.document]]] = True

    def counts(self, documents: int) -> tuple[np.ndarray, np.ndarray]:
        """Return for each document how many windows are kept, and how many of these are marked."""
        kept = np.bincount(self.document, minlength=documents)
        return kept, np.bincount(self.document[self._seen[self._index]], minlength=documents)

    def _slot(self, hashes: np.ndarray) -> np.ndarray:
        return ((hashes >> np.uint64(32)) & self._mask).astype(np.int64)

    def _keep(self, hashes: np.ndarray, numbers: np.ndarray) -> None:
        if self._step > 1:
            chosen = hashes & np.uint64(self._step - 1) == 0
            hashes, numbers = hashes[chosen], numbers[chosen]
        self._kept.append((hashes, numbers))
        self._size += len(hashes)

    def _thin(self, most: int) -> None:
        """Halve the sample of windows until at most `most` are left."""
        while self._size > most:
            self._step *= 2
            kept, self._kept, self._size = self._kept, [], 0
            for hashes, numbers in kept:
                self._keep(hashes, numbers)


def overlap(train: Iterable[TokenFile], held_out: TokenFile, tokenizer: Tokenizer) -> Overlap:
    """Return the number of windows of the held-out text, sampled if it is large, and how many of these occur in the
    training text, which a model may have memorized."""
    windows = WindowSample()
    windows.add((0, text) for text in _documents(held_out, tokenizer))
    windows.find(text for file in train for text in _documents(file, tokenizer))
    (kept,), (shared,) = windows.counts(1)
    share = shared / max(kept, 1)
    return Overlap(window_bytes=WINDOW, windows=int(kept), in_training_text=int(shared), share=share)


def _documents(file: TokenFile, tokenizer: Tokenizer) -> Iterator[Iterator[bytes]]:
    bounds = [*file.starts.tolist(), len(file.tokens)]
    for begin, end in pairwise(bounds):
        yield (
            tokenizer.decode_bytes(file.tokens[at : min(at + PIECE, end)].tolist()) for at in range(begin, end, PIECE)
        )
