"""What a user should know of a text that was read: files that were left out, or read in another encoding."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SHOWN = 5


def notes(source: dict[str, Any]) -> Iterator[str]:
    """Iterate over sentences on one source, as the info of token files describes it."""
    for encoding, found in source.get("encodings", {}).items():
        yield f"read as {encoding}: {named(found)}"
    for reason, found in source["left_out"].items():
        yield f"left out, {reason}: {named(found)}"


def named(found: dict[str, Any]) -> str:
    """Return the first names of some documents, and how many there are beside them."""
    here = str(Path.cwd()) + os.sep
    names = [name.removeprefix(here) for name in found.get("names", [])[:SHOWN]]
    more = found["documents"] - len(names)
    return ", ".join([*names, *([f"and {more:,} more" if names else f"{more:,}"] if more else [])])
