"""Lengths in tokens, written as 256, 1k, 16k or 1m; k, m and g are powers of 1,024."""

import re

from lmlong.errors import UsageError

LONGEST = 1 << 40
"""The largest length accepted on a command line; the options of a recipe have their own bounds."""

UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def parse_length(word: str) -> int | None:
    """Return the tokens of a length such as 256, 4k or 1m; None if it is not a length."""
    match = re.fullmatch(r"0*([1-9][0-9]*)([kKmMgG]?)", word, re.ASCII)
    return int(match[1]) * UNITS[match[2].lower()] if match else None


def parse_lengths(text: str) -> list[int]:
    """Return the lengths in a list such as 256,1k,4k, sorted and without duplicates."""
    lengths = set()
    for word in map(str.strip, text.split(",")):
        length = parse_length(word)
        if length is None:
            hint = "Write whole numbers such as 256,1k,4k,1m (k is 1,024, m 1,024 k)."
            raise UsageError(f"--lengths: '{word}' is not a length. {hint}")
        if why := too_long(length):
            raise UsageError(f"--lengths: {word[:40]} is {why}. Name shorter ones.")
        lengths.add(length)
    return sorted(lengths)


def name_length(length: int) -> str:
    """Return a length with the largest unit that divides it."""
    unit = next(unit for unit in ("g", "m", "k", "") if length % UNITS[unit] == 0)
    return f"{length // UNITS[unit]}{unit}"


def too_long(length: int) -> str:
    """Return why a length is refused, or an empty string."""
    return "" if length <= LONGEST else f"more than {name_length(LONGEST)} tokens, which no text has"
