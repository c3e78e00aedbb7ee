"""Real text to cut prompts from: the standard library of the Python that runs."""

import random
import sysconfig
from collections.abc import Sequence
from functools import cache
from pathlib import Path

ENOUGH = 40_000_000
"""Bytes."""


@cache
def library() -> str:
    """Return the sources of the standard library as one text, in an order that is always the same."""
    folder, parts, size = Path(sysconfig.get_paths()["stdlib"]), list[str](), 0
    for path in sorted(folder.rglob("*.py")):
        if "site-packages" in path.parts or size > ENOUGH:
            continue
        parts.append(path.read_bytes().decode("utf-8", "ignore").replace("\0", ""))
        size += len(parts[-1])
    return "".join(parts)


def cut(draw: random.Random, shortest: int, longest: int) -> str:
    """Return some characters of it, from anywhere."""
    text, size = library(), draw.randint(shortest, longest)
    begin = draw.randrange(len(text) - size)
    return text[begin : begin + size]


def shared(one: Sequence[str], other: Sequence[str]) -> int:
    """Return how many characters, or tokens, two texts begin with in common."""
    least, most = 0, min(len(one), len(other))
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if one[least:middle] == other[least:middle] else (least, middle - 1)
    return least
