"""Split documents into training and validation text by content, not by order."""

from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Literal, NamedTuple

from lmlong.data.document import Document, Measure, Skipped
from lmlong.errors import UsageError

SIZE = 16
"""Bytes of the digest that identifies a document."""

FEW = 20  # with fewer documents the end of each is held out, since the hash may choose none of them


Split = Literal["train", "validation"]


class Part(NamedTuple):
    """The part of a document that belongs to one split, from `start` to `end` in bytes of UTF-8."""

    document: Document
    start: int
    end: int
    split: Split
    read: Measure  # of the whole document
    near_copy: bool = False  # whether it is trained on only since it is a near-copy of training text

    def pieces(self) -> Iterator[str]:
        """Yield the text of this part. A character that crosses a boundary belongs to the part before it."""
        offset = 0
        for piece in self.document.pieces():
            data = piece.encode()
            text = data[_character_boundary(data, self.start - offset) : _character_boundary(data, self.end - offset)]
            if text:
                yield text.decode()
            offset += len(data)
            if offset >= self.end:
                return
        if offset < self.end:
            raise UsageError(f"{self.document.name}: became shorter while it was read. Try again when it is complete.")


def split(
    entries: Iterable[Document | Skipped],
    fraction: float,
    why_not: Callable[[bytes], str | None] = lambda digest: None,
    near_copies: Collection[bytes] = (),
) -> Iterator[Part | Skipped]:
    """Divide documents so that about `fraction` of their text is validation. 0 and 1 give all of it to one split. A
    document is skipped if `why_not` returns a reason for its digest. Documents in `near_copies`, the first bytes of
    digests, are not held out."""
    measured = _measure(entries, why_not)
    first: list[tuple[Document, Measure]] = []
    for entry in measured:
        if isinstance(entry, Skipped):
            yield entry
        else:
            first.append(entry)
            if len(first) == FEW:
                break
    near = frozenset(near_copies) if 0 < fraction < 1 else frozenset()
    divide = _by_position if len(first) < FEW and 0 < fraction < 1 else partial(_by_hash, near=near)
    for entry in chain(first, measured):
        if isinstance(entry, Skipped):
            yield entry
        else:
            yield from divide(*entry, fraction)


def _measure(
    entries: Iterable[Document | Skipped], why_not: Callable[[bytes], str | None]
) -> Iterator[tuple[Document, Measure] | Skipped]:
    for entry in entries:
        if isinstance(entry, Skipped):
            yield entry
            continue
        measure = entry.measure()
        reason = why_not(measure.digest) if measure.bytes else "empty"
        yield Skipped(entry.name, reason, measure.read_bytes) if reason else (entry, measure)


def _by_hash(document: Document, measure: Measure, fraction: float, near: frozenset[bytes]) -> Iterator[Part]:
    chosen = int.from_bytes(measure.digest[:8], "big") < fraction * 2**64
    near_copy = chosen and measure.digest[:SIZE] in near
    yield Part(document, 0, measure.bytes, "validation" if chosen and not near_copy else "train", measure, near_copy)


def _by_position(document: Document, measure: Measure, fraction: float) -> Iterator[Part]:
    boundary = max(1, round(measure.bytes * (1 - fraction)))
    yield Part(document, 0, boundary, "train", measure)
    yield Part(document, boundary, measure.bytes, "validation", measure)


def _character_boundary(data: bytes, offset: int) -> int:
    """Return `offset`, limited to `data` and moved forward to the beginning of a character."""
    offset = min(max(offset, 0), len(data))
    while offset < len(data) and data[offset] & 0xC0 == 0x80:
        offset += 1
    return offset
