"""Plug-ins on the command line: the option --plugin, and recipes that name some."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from lmlong.recipe import Recipe


def load_plugin(name: str) -> None:
    """Load a plug-in; torch is imported only where there is one."""
    from lmlong.attention import plugins

    plugins.load_plugin(name)


def load_recipe(name: str, overrides: Sequence[str] = ()) -> "Recipe":
    """Load a recipe that the user has named, with the plug-ins that it names."""
    from lmlong.recipe import file

    return file.load(name, overrides, load_plugin)


def _load(context: click.Context, option: click.Parameter, names: tuple[str, ...]) -> None:
    for name in () if context.resilient_parsing else names:  # a shell that completes a command runs nothing
        load_plugin(name)


OPTION = click.Option(
    ["--plugin"],
    multiple=True,
    metavar="FILE|NAME",
    expose_value=False,
    callback=_load,
    help="Attentions and feature maps of your own: a Python file, or an installed plug-in; repeatable.",
)


def with_option(command: click.Command) -> click.Command:
    """Return a command, which and whose subcommands take --plugin."""
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            with_option(inner)
    elif OPTION not in command.params:
        command.params.append(OPTION)
    return command
