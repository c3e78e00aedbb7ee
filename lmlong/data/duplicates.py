"""Duplicate documents, which a recipe may drop, and near-copies of training documents, which are never held out.

A held-out near-copy would reward a model for memorizing the training text. So a document that its hash holds out is
trained on instead if a fifth of its windows occur in the training text. No document is dropped, and no further document
is held out.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lmlong.data.document import Document, Skipped
from lmlong.data.sources import Source, size_of
from lmlong.data.split import SIZE, Part, Split, split
from lmlong.data.windows import WindowSample
from lmlong.io.cache import cache_folder, fetch, key_of
from lmlong.io.folder_manifest import Format
from lmlong.report.progress import Progress

Duplicates = Literal["keep", "drop"]

NEAR_COPIES = Format("near-copies", 1)

NEAR_COPY_SHARE = 0.2
"""A held-out document is a near-copy if at least this share of its windows occurs in the training text."""

MAX_MOVED = 0.5
"""Maximum share of the held-out text that is trained on instead. If more of it is near-copies, the text is repetitive
by nature, like logs whose lines follow a few templates, and every document stays where its hash put it."""


def divided(
    sources: list[Source], duplicates: Duplicates, near: frozenset[bytes] | None = None
) -> list[Iterator[Part | Skipped]]:
    """Return the documents of each source, divided as `split` does. Near-copies, whose digests are `near` or are
    searched, are not held out. Read the sources in order, since duplicates are dropped that occurred in earlier
    sources."""
    if near is None:
        near = near_copies(sources, duplicates)
    if duplicates == "keep":
        return [split(source.documents(), source.held_out, near_copies=near) for source in sources]
    duplicate_filter = _DuplicateFilter(sources)
    return [
        split(source.documents(), source.held_out, partial(duplicate_filter.why_not, source.held_out == 1), near)
        for source in sources
    ]


def split_key(sources: list[Source], duplicates: Duplicates) -> list[Any]:
    """Return everything that the division of the documents depends on."""
    return [
        [(source.fingerprint, source.held_out, source.remote, source.errors) for source in sources],
        *([] if duplicates == "keep" else ["without duplicates"]),
    ]


def near_copies(sources: list[Source], duplicates: Duplicates) -> frozenset[bytes]:
    """Return the digests of held-out documents that are near-copies of training documents, cached. Sources that are
    held out entirely or not at all are not searched, nor are remote sources, which would be read twice."""
    searched = [source for source in sources if 0 < source.held_out < 1 and not source.remote]
    if not searched:
        return frozenset()

    def find(folder: Path) -> None:
        (folder / "digests").write_bytes(b"".join(sorted(_find_near_copies(searched, duplicates))))

    key = key_of(NEAR_COPIES, *split_key(sources, duplicates))
    data = (fetch(cache_folder() / "near-copies" / key, NEAR_COPIES, find) / "digests").read_bytes()
    return frozenset(data[begin : begin + SIZE] for begin in range(0, len(data), SIZE))


def _find_near_copies(sources: list[Source], duplicates: Duplicates) -> set[bytes]:
    digests, sizes = [], []

    def held_out() -> Iterator[tuple[int, Iterator[bytes]]]:
        for part in _parts(sources, duplicates, "validation"):
            if part.start == 0:  # otherwise it is the end of a document that was split by position
                digests.append(part.read.digest[:SIZE])
                sizes.append(part.end)
                yield len(digests) - 1, _encoded(part)

    windows = WindowSample()
    windows.add(held_out())
    if not digests:
        return set()
    total = size_of(sources)
    with Progress("near-copies", total and total - sum(sizes)) as progress:
        windows.find(_encoded(part, progress) for part in _parts(sources, duplicates, "train"))
    near, has_new = np.zeros(len(digests), bool), True
    while has_new:  # a near-copy becomes training text, which may make other documents near-copies
        kept, marked = windows.counts(len(digests))
        is_near = marked >= np.maximum(NEAR_COPY_SHARE * kept, 1)
        has_new, near = bool((is_near & ~near).any()), is_near | near
        windows.mark(near)
    moved = np.array(sizes)[near].sum()
    return {digests[number] for number in np.flatnonzero(near)} if moved <= MAX_MOVED * sum(sizes) else set()


def _parts(sources: list[Source], duplicates: Duplicates, name: Split) -> Iterator[Part]:
    for entries in divided(sources, duplicates, near=frozenset()):
        yield from (part for part in entries if isinstance(part, Part) and part.split == name)


def _encoded(part: Part, progress: Progress | None = None) -> Iterator[bytes]:
    for piece in part.pieces():
        data = piece.encode("utf-8", "surrogatepass")
        if progress:
            progress.update(len(data))
        yield data


class _DuplicateFilter:
    """The texts of a recipe read so far, and the texts of its validation sources. Validation sources are read first and
    stay unchanged, so that results on them are comparable; their texts are dropped from the training text."""

    def __init__(self, sources: list[Source]):
        self._read, self._held_out = set[bytes](), set[bytes]()  # the first bytes of digests
        for source in sources:
            for document in source.documents() if source.held_out == 1 else ():
                if isinstance(document, Document):
                    self._held_out.add(document.measure().digest[:SIZE])

    def why_not(self, held_out: bool, digest: bytes) -> str | None:
        """Add a text. Return why it is dropped, or None."""
        if not held_out and digest[:SIZE] in self._held_out:
            return "in the validation text"
        if digest[:SIZE] in self._read:
            return "a duplicate"
        self._read.add(digest[:SIZE])
        return None
