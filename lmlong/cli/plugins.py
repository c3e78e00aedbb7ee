"""Plug-ins of the command line and of recipes that it names."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

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
