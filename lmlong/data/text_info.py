"""What is known of a text from writing its token files, as info.json holds it, and notes on it for the user."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pydantic import Field

from lmlong.data.document import Skipped
from lmlong.data.encoding import UTF8
from lmlong.data.split import Part
from lmlong.data.token_file import Count
from lmlong.io.checked import Checked

SHOWN, NAMED = 5, 20
"""Maximum number of documents named for each reason: to the user, and in the info of token files."""

NOTED_OVERLAP = 0.05
"""Share of the windows of the held-out text from which training begins with a note."""


class Documents(Checked):
    """Some documents of a source, and the first of their names."""

    documents: int = 0
    bytes: int = 0
    names: list[str] = Field(default_factory=list)

    def add(self, name: str, size: int) -> None:
        self.documents += 1
        self.bytes += size
        if len(self.names) < NAMED:
            self.names.append(name)


ByReason = dict[str, Documents]


class Read(Checked):
    """What was read of a source."""

    documents: int = 0
    bytes: int = 0
    replaced_bytes: int = 0
    put_in_bytes: int = 0
    recoded_bytes: int = 0
    replaced_characters: int | None = None  # those that the tokenizer does not have


class SourceInfo(Checked):
    """A source: what was read of it and skipped, and its size in each split."""

    name: str
    read: Read = Field(default_factory=Read)
    skipped: ByReason = Field(default_factory=dict)
    encodings: ByReason = Field(default_factory=dict)
    near_copies: Documents = Field(default_factory=Documents)
    train: Count | None = None
    validation: Count | None = None

    def add(self, part: Part | Skipped) -> None:
        """Count a skipped document, or a document by its first part."""
        if isinstance(part, Skipped):
            _count(self.skipped, part.reason, part.name, part.bytes)
        elif part.start == 0:
            name, measure, read = part.document.name, part.read, self.read
            read.documents += 1
            read.bytes += measure.read_bytes
            read.replaced_bytes += measure.replaced_bytes
            read.put_in_bytes += measure.put_in_bytes
            # from another encoding to UTF-8
            read.recoded_bytes += measure.bytes - measure.put_in_bytes - (measure.read_bytes - measure.replaced_bytes)
            if part.near_copy:
                self.near_copies.add(name, measure.bytes)
            if part.document.encoding != UTF8:
                _count(self.encodings, part.document.encoding, name, measure.read_bytes)


class Overlap(Checked):
    """Windows of the held-out text that occur in the training text."""

    window_bytes: int
    windows: int = 0
    in_training_text: int = 0
    share: float


class Info(Checked):
    """The content of info.json, which describes token files."""

    tokenizer: str = ""
    vocabulary: int = 0
    sources: list[SourceInfo]
    overlap: Overlap


def _count(counts: ByReason, reason: str, name: str, size: int) -> None:
    counts.setdefault(reason, Documents()).add(name, size)


def by_reason(entries: Iterable[Skipped]) -> dict[str, dict[str, Any]]:
    """Return counts of documents and bytes for each reason, with the first names."""
    counts: ByReason = {}
    for entry in entries:
        _count(counts, entry.reason, entry.name, entry.bytes)
    return {reason: documents.model_dump() for reason, documents in counts.items()}


def text_notes(info: dict[str, Any]) -> Iterator[str]:
    """Yield sentences on the text of a recipe, from the info of its token files."""
    for source in info["sources"]:
        yield from (f"{source['name']}: {note}" for note in notes(source))
    if info["overlap"]["share"] >= NOTED_OVERLAP:
        yield overlap_note(info["overlap"])


def overlap_note(overlap: dict[str, Any]) -> str:
    """Return the overlap as a sentence."""
    windows = f"{overlap['window_bytes']}-byte windows"
    return f"{overlap['share']:.1%} of the {windows} of the held-out text occur in the training text"


def notes(source: dict[str, Any]) -> Iterator[str]:
    """Yield sentences on one source, from the info of its token files."""
    for encoding, counts in source.get("encodings", {}).items():
        yield f"read as {encoding}: {named(counts)}"
    if replaced := source.get("read", {}).get("replaced_characters"):
        yield f"U+FFFD in place of {replaced:,} characters missing from text.tokenizer.alphabet"
    for reason, counts in source["left_out"].items():
        yield f"left out, {reason}: {named(counts)}"


def named(counts: dict[str, Any]) -> str:
    """Return the first names of some documents, and how many more there are."""
    here = str(Path.cwd()) + os.sep
    names = [name.removeprefix(here) for name in counts.get("names", [])[:SHOWN]]
    more = counts["documents"] - len(names)
    return ", ".join([*names, *([f"and {more:,} more" if names else f"{more:,}"] if more else [])])
