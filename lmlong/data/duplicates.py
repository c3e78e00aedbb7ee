"""Documents whose text is the same as that of another one, found by the digests of all."""

from collections.abc import Iterator
from functools import partial
from typing import Literal

from lmlong.data.reading import Document, Skipped
from lmlong.data.sources import Input
from lmlong.data.split import Part, split

Duplicates = Literal["keep", "drop"]

SIZE = 16
"""Bytes of a digest that are kept."""

EMPTY = bytes(SIZE)


def divide(inputs: list[Input], duplicates: Duplicates) -> Iterator[tuple[int, Part | Skipped]]:
    """Divide the documents of all sources as `split` does, each with the number of its source."""
    for number, entries in enumerate(divided(inputs, duplicates)):
        for entry in entries:
            yield number, entry


def divided(inputs: list[Input], duplicates: Duplicates) -> list[Iterator[Part | Skipped]]:
    """Return the documents of each source, divided as `split` does; what is dropped depends on the sources before, so
    they are to be read in order."""
    if duplicates == "keep":
        return [split(entry.source.documents(), entry.held_out) for entry in inputs]
    known = _Known(inputs)
    return [
        split(entry.source.documents(), entry.held_out, partial(known.why_not, entry.held_out == 1)) for entry in inputs
    ]


def without_duplicates(duplicates: Duplicates) -> list[str]:
    """Return what the choice adds to all that token files depend on."""
    return [] if duplicates == "keep" else ["without duplicates"]


class _Known:
    """The texts of a recipe that were read before, and those of the sources to validate on, which are read first: they
    stay as they are, so that what is measured on them can be compared, and are left out of the training text."""

    def __init__(self, inputs: list[Input]):
        self._read, self._held_out = DigestSet(), DigestSet()
        for entry in inputs:
            for document in entry.source.documents() if entry.held_out == 1 else ():
                if isinstance(document, Document):
                    self._held_out.add(document.measure().digest)

    def why_not(self, held_out: bool, digest: bytes) -> str | None:
        """Return why a text is left out, and know it from now on."""
        if not held_out and digest in self._held_out:
            return "in the validation text"
        return None if self._read.add(digest) else "a duplicate"


class DigestSet:
    """The first bytes of digests, in a hash table of one block of memory: a Python set takes five times as much."""

    def __init__(self) -> None:
        self._slots = 1 << 10
        self._table = bytearray(SIZE * self._slots)
        self._used = 0

    @property
    def memory(self) -> int:
        """Return the bytes of the table: 24 to 48 for each digest."""
        return len(self._table)

    def __contains__(self, digest: bytes) -> bool:
        start = self._place(digest[:SIZE])
        return self._table[start : start + SIZE] != EMPTY

    def add(self, digest: bytes) -> bool:
        """Add a digest; False where it is there."""
        if digest in self:
            return False
        if 3 * self._used >= 2 * self._slots:
            self._grow()
        start = self._place(digest[:SIZE])
        self._table[start : start + SIZE] = digest[:SIZE]
        self._used += 1
        return True

    def _place(self, key: bytes) -> int:
        """Return where a key stands, or where it is to be put."""
        slot = int.from_bytes(key[:8], "big") % self._slots
        while (found := self._table[SIZE * slot : SIZE * (slot + 1)]) != EMPTY and found != key:
            slot = (slot + 1) % self._slots
        return SIZE * slot

    def _grow(self) -> None:
        old, self._slots = self._table, 2 * self._slots
        self._table = bytearray(SIZE * self._slots)
        for start in range(0, len(old), SIZE):
            if (key := bytes(old[start : start + SIZE])) != EMPTY:
                place = self._place(key)
                self._table[place : place + SIZE] = key
