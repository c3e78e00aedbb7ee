"""Lists as options take them: 4,8,16 or context,state."""

from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from lmlong.errors import UsageError, nearest

Number = TypeVar("Number", int, float)
Name = TypeVar("Name", bound=str)


def parse_numbers(option: str, text: str, kind: Callable[[str], Number], example: str) -> tuple[Number, ...]:
    """Return the numbers of a list like 4,8,16."""
    try:
        return tuple(kind(word) for word in text.split(","))
    except ValueError:
        raise UsageError(f"{option}: '{text}' is no list of numbers. Write them like {example}.") from None


def format_numbers(numbers: Sequence[float]) -> str:
    """Return numbers as a list like 4,8,16."""
    return ",".join(f"{number:g}" for number in numbers)


def parse_names(option: str, text: str, known: Collection[Name]) -> tuple[Name, ...]:
    """Return the names of a list like context,state, each once, in the order of the list."""
    names = {name: name for name in known}
    words = dict.fromkeys(word.strip() for word in text.split(","))
    for word in words:
        if word not in names:
            hint = nearest(word, known) or f" Known: {', '.join(known)}."
            raise UsageError(f"{option}: there is no '{word}'.{hint}")
    return tuple(names[word] for word in words)  # type: ignore[index]
