"""Find, read, load and write recipes: what the rest of lmlong needs of recipe files."""

import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from lmlong.recipe.parsed import MissingPlugin, find, parse_recipe, read, shipped_recipes
from lmlong.recipe.paths import without_folders
from lmlong.recipe.root import Recipe, validated, with_absolute_paths

__all__ = [
    "MissingPlugin",
    "dump",
    "dump_without_folders",
    "find",
    "load",
    "read",
    "shipped_recipes",
    "with_absolute_paths",
]


def load(
    source: str | Path | Mapping[str, Any],
    overrides: Sequence[str] | Mapping[str, Any] = (),
    load_plugin: Callable[[str], object] | None = None,
    as_trained: bool = False,
) -> Recipe:
    """Load a recipe from a file or from a dict of sections, with its paths made absolute.

    `overrides` are words key.path=value, or values by their key.path. Missing values are taken from the run of
    training.init_from, or are defaults; a recipe `as_trained` is complete.

    The plug-ins that the recipe lists are loaded by `load_plugin`. Without it nothing is imported: an untrusted recipe,
    such as that of a checkpoint, then needs its plug-ins to be loaded already.
    """
    parsed = parse_recipe(source, overrides, as_trained)
    if load_plugin:
        parsed.load_plugins(load_plugin)
    else:
        parsed.check_plugins()
    return validated(parsed)


def dump(recipe: Recipe) -> str:
    """Return a recipe as YAML with every key, which `load` reads back as the same recipe."""
    return _yaml(recipe.model_dump())


def dump_without_folders(recipe: Recipe) -> str:
    """Return a recipe as YAML that names files without their folders, to be published."""
    return _yaml(without_folders(recipe.model_dump()))


def _yaml(values: dict[str, Any]) -> str:
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]  # declared as None
    # ruamel writes this line break unescaped, and reads it back as a different one.
    yaml.allow_unicode = "\x85" not in json.dumps(values, ensure_ascii=False, default=str)
    yaml.width = 4096  # folded lines would make long paths hard to read and to search
    text = io.StringIO()
    yaml.dump(values, text)
    return text.getvalue()
