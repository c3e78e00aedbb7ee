"""Notes for the user on a text: files that were left out or read in another encoding."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lmlong.data.document import Skipped

SHOWN, NAMED = 5, 20
"""Maximum number of documents named for each reason: to the user, and in the info of token files."""

NOTED_OVERLAP = 0.05
"""Share of the windows of the held-out text from which training begins with a note."""


def by_reason(entries: Iterable[Skipped]) -> dict[str, dict[str, Any]]:
    """Return counts of documents and bytes for each reason, with the first names."""
    counts: dict[str, dict[str, Any]] = {}
    for entry in entries:
        count(counts, entry)
    return counts


def count(counts: dict[str, dict[str, Any]], entry: Skipped) -> None:
    """Add a document to the counts by reason."""
    of_reason = counts.setdefault(entry.reason, {"documents": 0, "bytes": 0, "names": []})
    of_reason["documents"] += 1
    of_reason["bytes"] += entry.bytes
    if len(of_reason["names"]) < NAMED:
        of_reason["names"].append(entry.name)


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
