"""Lengths as people write them: 256, 1k, 16k, where k means 1,024."""

import re

from lmlong.errors import UsageError


def parse_lengths(text: str) -> list[int]:
    """The lengths in a list like 256,1k,4k: each once, the shortest first."""
    return sorted({_parse(word.strip()) for word in text.split(",")})


def name_length(length: int) -> str:
    """A length as a person writes it."""
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


def _parse(word: str) -> int:
    match = re.fullmatch(r"0*([1-9][0-9]*)([kK]?)", word, re.ASCII)
    if not match:
        raise UsageError(f"--lengths: '{word}' is no length. Write whole numbers such as 256,1k,4k (k is 1,024).")
    return int(match[1]) * (1024 if match[2] else 1)
