"""Prompts cut from the standard library of this Python."""

import random
import sysconfig
from functools import cache
from pathlib import Path

ENOUGH = 40_000_000
"""Bytes."""


@cache
def library() -> str:
    """Return the sources of the standard library as one text, in a fixed order."""
    folder, parts, size = Path(sysconfig.get_paths()["stdlib"]), list[str](), 0
    for path in sorted(folder.rglob("*.py")):
        if "site-packages" in path.parts or size > ENOUGH:
            continue
        parts.append(path.read_bytes().decode("utf-8", "ignore").replace("\0", ""))
        size += len(parts[-1])
    return "".join(parts)


def cut(draw: random.Random, shortest: int, longest: int) -> str:
    """Return `shortest` to `longest` characters from a random position."""
    text, size = library(), draw.randint(shortest, longest)
    begin = draw.randrange(len(text) - size)
    return text[begin : begin + size]
