"""Lists of numbers as options take them: 4,8,16."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from lmlong.errors import UsageError

Number = TypeVar("Number", int, float)


def read(option: str, text: str, kind: Callable[[str], Number], example: str) -> tuple[Number, ...]:
    """The numbers that a user wrote for an option."""
    try:
        return tuple(kind(word) for word in text.split(","))
    except ValueError:
        raise UsageError(f"{option}: '{text}' is no list of numbers. Write them like {example}.") from None


def write(numbers: Sequence[float]) -> str:
    """Numbers as a user would write them."""
    return ",".join(f"{number:g}" for number in numbers)
