"""Which text trains and which validates: decided by each document's content, never by its place among others."""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Literal, NamedTuple

from lmlong.errors import UsageError
from lmlong.text.reading import Document, Measure, Skipped

FEW = 20  # a source of fewer documents gives the end of each, since a hash could well choose none of them


class Part(NamedTuple):
    """The stretch of a document that belongs to one split, from `start` to `end` in bytes of UTF-8."""

    document: Document
    start: int
    end: int
    split: Literal["train", "validation"]
    read: Measure  # what was found in the whole document

    def pieces(self) -> Iterator[str]:
        """The text of this part; a character that crosses a border belongs to the part before it."""
        offset = 0
        for piece in self.document.pieces():
            data = piece.encode()
            text = data[_border(data, self.start - offset) : _border(data, self.end - offset)]
            if text:
                yield text.decode()
            offset += len(data)
            if offset >= self.end:
                return
        if offset < self.end:
            raise UsageError(f"{self.document.name}: became shorter while it was read. Try again when it is at rest.")


def split(entries: Iterable[Document | Skipped], fraction: float) -> Iterator[Part | Skipped]:
    """Divide documents so that about `fraction` of their text is validation; 0 and 1 give all of it to one split."""
    measured = _measure(entries)
    first: list[tuple[Document, Measure]] = []
    for entry in measured:
        if isinstance(entry, Skipped):
            yield entry
        else:
            first.append(entry)
            if len(first) == FEW:
                break
    divide = _by_place if len(first) < FEW and 0 < fraction < 1 else _by_hash
    for entry in chain(first, measured):
        if isinstance(entry, Skipped):
            yield entry
        else:
            yield from divide(*entry, fraction)


def _measure(entries: Iterable[Document | Skipped]) -> Iterator[tuple[Document, Measure] | Skipped]:
    for entry in entries:
        if isinstance(entry, Skipped):
            yield entry
        elif (measure := entry.measure()).bytes:
            yield entry, measure
        else:
            yield Skipped(entry.name, "empty", measure.read_bytes)


def _by_hash(document: Document, measure: Measure, fraction: float) -> Iterator[Part]:
    held_out = int.from_bytes(measure.digest[:8], "big") < fraction * 2**64
    yield Part(document, 0, measure.bytes, "validation" if held_out else "train", measure)


def _by_place(document: Document, measure: Measure, fraction: float) -> Iterator[Part]:
    border = max(1, round(measure.bytes * (1 - fraction)))
    yield Part(document, 0, border, "train", measure)
    yield Part(document, border, measure.bytes, "validation", measure)


def _border(data: bytes, place: int) -> int:
    """`place` within `data`, moved on to where a character begins."""
    place = min(max(place, 0), len(data))
    while place < len(data) and data[place] & 0xC0 == 0x80:
        place += 1
    return place
