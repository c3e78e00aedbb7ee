"""Documents that repeat others: exact duplicates, which the recipe may drop, and near-copies of training documents,
which are never held out.

A near-copy among the held-out documents would let a model look good by having learned it by heart. So a document that
the hash of its text holds out is trained on instead if a fifth of its windows occur in the training text. Nothing is
lost, and no document is held out that would not be without this.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lmlong.data.document import Document, Skipped
from lmlong.data.progress import Progress, size_of
from lmlong.data.sources import Input
from lmlong.data.split import SIZE, Part, split
from lmlong.data.windows import Windows
from lmlong.io.cache import cache_folder, fetch, key_of
from lmlong.io.folder_manifest import Format

Duplicates = Literal["keep", "drop"]

NEAR_COPIES = Format("near-copies", 1)

NEAR = 0.2
"""Share of a held-out document's windows in the training text from which on it is trained on instead."""

MOST_MOVED = 0.5
"""Share of the held-out text up to which near-copies are trained on. If more of it were, as of logs, whose lines all
follow a few templates, repetition is what the text is like, and all of it stays where the hash put it."""

EMPTY = bytes(SIZE)


def divide(inputs: list[Input], duplicates: Duplicates) -> Iterator[tuple[int, Part | Skipped]]:
    """Divide the documents of all sources as `split` does, each with the number of its source."""
    for number, entries in enumerate(divided(inputs, duplicates)):
        for entry in entries:
            yield number, entry


def divided(inputs: list[Input], duplicates: Duplicates) -> list[Iterator[Part | Skipped]]:
    """Return the documents of each source, divided as `split` does, near-copies of training documents never held out.
    What is dropped depends on the sources before, so they are to be read in order."""
    return _divided(inputs, duplicates, near_copies(inputs, duplicates))


def _divided(
    inputs: list[Input], duplicates: Duplicates, near: frozenset[bytes] = frozenset()
) -> list[Iterator[Part | Skipped]]:
    if duplicates == "keep":
        return [split(entry.source.documents(), entry.held_out, near_copies=near) for entry in inputs]
    known = _Known(inputs)
    return [
        split(entry.source.documents(), entry.held_out, partial(known.why_not, entry.held_out == 1), near)
        for entry in inputs
    ]


def split_key(inputs: list[Input], duplicates: Duplicates) -> list[Any]:
    """Return all that the division of the documents depends on."""
    return [
        [(entry.source.fingerprint, entry.held_out, entry.source.remote, entry.errors) for entry in inputs],
        *([] if duplicates == "keep" else ["without duplicates"]),
    ]


def near_copies(inputs: list[Input], duplicates: Duplicates) -> frozenset[bytes]:
    """Return the digests of the documents that a hash holds out and that are near-copies of training documents, from
    the cache or found now. Sources of which all or nothing is held out are left as they are; remote ones too, as it
    takes reading them twice."""
    searched = [entry for entry in inputs if 0 < entry.held_out < 1 and not entry.source.remote]
    if not searched:
        return frozenset()

    def find(folder: Path) -> None:
        (folder / "digests").write_bytes(b"".join(sorted(_find_near_copies(searched, duplicates))))

    key = key_of(NEAR_COPIES, *split_key(inputs, duplicates))
    data = (fetch(cache_folder() / "near-copies" / key, NEAR_COPIES, find) / "digests").read_bytes()
    return frozenset(data[begin : begin + SIZE] for begin in range(0, len(data), SIZE))


def _find_near_copies(inputs: list[Input], duplicates: Duplicates) -> set[bytes]:
    digests, sizes = [], []

    def held_out() -> Iterator[tuple[int, Iterator[bytes]]]:
        for part in _parts(inputs, duplicates, "validation"):
            if part.start == 0:  # else it is the end of one of few documents
                digests.append(part.read.digest[:SIZE])
                sizes.append(part.end)
                yield len(digests) - 1, _encoded(part)

    windows = Windows()
    windows.add(held_out())
    if not digests:
        return set()
    total = size_of(inputs)
    with Progress("near-copies", total and total - sum(sizes)) as progress:
        windows.find(_encoded(part, progress) for part in _parts(inputs, duplicates, "train"))
    near, found = np.zeros(len(digests), bool), True
    while found:  # a document that is trained on is training text, too
        kept, seen = windows.counts(len(digests))
        now = seen >= np.maximum(NEAR * kept, 1)
        found, near = bool((now & ~near).any()), now | near
        windows.mark(near)
    moved = np.array(sizes)[near].sum()
    return {digests[number] for number in np.flatnonzero(near)} if moved <= MOST_MOVED * sum(sizes) else set()


def _parts(inputs: list[Input], duplicates: Duplicates, name: Literal["train", "validation"]) -> Iterator[Part]:
    for entries in _divided(inputs, duplicates):
        yield from (part for part in entries if isinstance(part, Part) and part.split == name)


def _encoded(part: Part, progress: Progress | None = None) -> Iterator[bytes]:
    for piece in part.pieces():
        data = piece.encode("utf-8", "surrogatepass")
        if progress:
            progress.update(len(data))
        yield data


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
