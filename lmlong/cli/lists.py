"""Lists as options take them: 4,8,16 or context,state."""

from collections.abc import Collection, Sequence
from typing import Any, TypeVar

import click

from lmlong.cli.options import Decorator
from lmlong.errors import UsageError, nearest

Name = TypeVar("Name", bound=str)


class Numbers(click.ParamType):
    """A list of numbers like 4,8,16."""

    name = "numbers"

    def __init__(self, kind: type[int] | type[float]):
        self.kind = kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        if not isinstance(value, str):
            return tuple(value)
        try:
            return tuple(self.kind(word) for word in value.split(","))
        except ValueError:
            option = param.opts[0] if param else "numbers"
            example = "8,16" if self.kind is int else "4e-3,8e-3"
            raise UsageError(f"{option}: '{value}' is not a list of numbers. Write it like {example}.") from None


def numbers(
    name: str, help: str, default: Sequence[float] | None = None, kind: type[int] | type[float] = int
) -> Decorator:
    """Return an option whose value is a tuple of numbers."""
    shown = None if default is None else format_numbers(default)
    return click.option(name, type=Numbers(kind), default=shown, metavar="N,...", help=help)


class Lengths(click.ParamType):
    """A list of lengths in tokens like 512,4k."""

    name = "lengths"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        from lmlong.recipe.lengths import parse_lengths

        return parse_lengths(value) if isinstance(value, str) else value


def lengths(help: str, default: str | None = None) -> Decorator:
    """Return the option --lengths, whose value is a sorted list of numbers of tokens."""
    return click.option("--lengths", type=Lengths(), default=default, metavar="N,...", help=help)


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
