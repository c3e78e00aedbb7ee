"""Lists as options take them: 512,4k or context,state."""

from collections.abc import Collection
from typing import Any, TypeVar

import click

from lmlong.cli.options import Decorator
from lmlong.errors import UsageError, nearest

Name = TypeVar("Name", bound=str)


class Lengths(click.ParamType):
    """A list of lengths in tokens like 512,4k."""

    name = "lengths"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        from lmlong.recipe.lengths import parse_lengths

        return parse_lengths(value) if isinstance(value, str) else value


def lengths(help: str, default: str | None = None) -> Decorator:
    """Return the option --lengths, whose value is a sorted list of numbers of tokens."""
    return click.option("--lengths", type=Lengths(), default=default, metavar="N,...", help=help)


def parse_names(option: str, text: str, known: Collection[Name]) -> tuple[Name, ...]:
    """Return the names of a list like context,state, each once, in the order of the list."""
    names = {name: name for name in known}
    words = dict.fromkeys(word.strip() for word in text.split(","))
    for word in words:
        if word not in names:
            hint = nearest(word, known) or f" Known: {', '.join(known)}."
            raise UsageError(f"{option}: there is no '{word}'.{hint}")
    return tuple(names[word] for word in words)  # type: ignore[index]
