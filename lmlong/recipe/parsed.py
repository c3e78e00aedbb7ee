"""Recipes before validation: found by name or path, or given as dicts, with overrides applied."""

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from lmlong.errors import RecipeError, UsageError, nearest, other_format
from lmlong.recipe.kinds import ATTENTION_KINDS, FEATURE_MAP_KINDS, attention_words
from lmlong.recipe.mistakes import sentences
from lmlong.recipe.paths import absolute, is_file
from lmlong.recipe.section import Options
from lmlong.recipe.yaml import (
    MAX_SIZE,
    BadOverride,
    BrokenYAML,
    KeyPath,
    Mistake,
    Tree,
    at,
    dotted,
    parse_yaml,
)

FORMAT: Literal[1] = 1
SUFFIXES = (".yaml", ".yml")
ATTENTION: KeyPath = ("model", "attention")

RECIPE = "recipe.yaml"
"""The file in a run folder or checkpoint that holds its recipe."""

ENVIRONMENT = "environment.json"
"""The file that marks a run folder."""

RUNS = Path("runs")
"""The folder of runs that are named by their recipes."""


class MissingPlugin(RecipeError):
    """A recipe needs a plug-in that is not loaded and that it may not load itself."""


def shipped_recipes() -> dict[str, Path]:
    """Return the files of the recipes that come with lmlong, by name."""
    package = Path(__file__).parents[1]
    installed, checkout = package / "recipes", package.parent / "recipes"
    folder = installed if installed.is_dir() else checkout
    return {file.stem: file for file in sorted(folder.glob("*.yaml"))}


def find_recipe(name_or_path: str) -> Path:
    """Return the file of a shipped recipe, or the one at a path."""
    path, shipped = Path(name_or_path), shipped_recipes()
    if name_or_path in shipped:
        file = shipped[name_or_path]
        return file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
    if path.is_file():
        return path
    hint = nearest(path.stem, shipped) or f" Shipped recipes: {', '.join(shipped)}."
    if (path / ENVIRONMENT).is_file() and (path / RECIPE).is_file():
        raise RecipeError([f"{name_or_path}: is a run. Resume it by: {resume_command(path)}"])
    if path.is_dir():
        remedy = "Name the recipe file in it, or train on its texts"
        raise RecipeError([f"{name_or_path}: is a folder, not a recipe. {remedy}: {_training_on(path, 'library')}."])
    is_path = path.name != name_or_path or path.suffix in SUFFIXES
    other = next((file for suffix in SUFFIXES if (file := path.with_suffix(suffix)).is_file()), None)
    if path.suffix in SUFFIXES and other:
        hint = f" Did you mean '{other}'?"
    raise RecipeError([f"{name_or_path}: {'there is no such file' if is_path else 'no recipe of that name'}.{hint}"])


def resume_command(run: Path) -> str:
    """Return the command that resumes a run."""
    return shlex.join(["lmlong", "train", str(run / RECIPE), "--resume", "auto"])


def read_recipe_file(file: Path) -> str:
    """Return the text of a recipe file."""
    try:
        if file.stat().st_size > MAX_SIZE:
            raise RecipeError([f"{file}: too large for a recipe. Name another file."])
        return file.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise RecipeError([f"{file}: cannot be read: {error.strerror}."]) from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise RecipeError([f"{file}:{line}: not UTF-8. Save the file in that encoding."]) from None


def parse_recipe(
    source: str | Path | Mapping[str, Any],
    overrides: Sequence[str] | Mapping[str, Any],
    as_trained: bool = False,
) -> Tree:
    """Return the values of a recipe before validation, from a file or from a dict of sections, with overrides applied.

    Missing values are taken from the run of training.init_from; a recipe `as_trained` is complete.
    """
    tree = Tree(_plain(source)) if isinstance(source, Mapping) else _read(find_recipe(str(source)))
    for given in overrides.items() if isinstance(overrides, Mapping) else overrides:
        _override(tree, given)
    if not as_trained:
        _complete_from_start(tree.values)
    version = tree.values.get("format")
    if type(version) is int and version > FORMAT:
        raise RecipeError([other_format(tree.file or "the recipe", version, FORMAT)])
    return tree


def _plain(values: Any) -> Any:
    """Return a copy of sections built in Python, typed ones as dicts of the options that were set."""
    if isinstance(values, Options):
        return values.model_dump(exclude_unset=True)
    if isinstance(values, Mapping):
        return {str(key): _plain(value) for key, value in values.items()}
    return [_plain(value) for value in values] if isinstance(values, list) else values


def _override(tree: Tree, given: str | tuple[str, Any]) -> None:
    """Replace a value by an override: key.path=value with a value in YAML, or a key and its value."""
    if isinstance(given, str):
        text, example = given, "key.path=value, such as training.steps=20."
        key, equals, value = given.partition("=")
    else:
        (key, value), equals = given, "="
        text, example = f"{key}={value!r}", "a key.path, such as training.steps."
    tree.overrides.append(text)
    try:
        if not equals or not all(key.split(".")):
            raise BadOverride(f"expected {example}")
        new = parse_yaml(value, text) if isinstance(given, str) else Tree(_plain(value), text)
        tree.replace(key, new)
    except BrokenYAML as error:
        tree.mistakes.append(Mistake((), text, f"broken YAML: {error}"))
    except BadOverride as error:
        tree.mistakes.append(Mistake((), text, str(error)))


def load_plugins(tree: Tree, load_plugin: Callable[[str], object]) -> None:
    """Load the plug-ins that a recipe lists; files are relative to the recipe's folder."""
    for number, name in _plugins(tree).items():
        origin = tree.origin(("plugins", number))
        folder = tree.file.parent if tree.file and isinstance(origin, int) else Path()
        try:
            load_plugin(absolute(folder / Path(name).expanduser()) if is_file(name) else name)
        except UsageError as error:
            mistake = Mistake(("plugins", number), origin, str(error))
            raise RecipeError(sentences(tree, [mistake])) from None


def check_plugins(tree: Tree) -> None:
    """Raise `MissingPlugin` if a recipe lists plug-ins and its attention needs one that is not loaded."""
    kinds, maps = attention_words(at(tree.values, ATTENTION))
    missing = [f"the attention {kind}" for kind in kinds if kind not in ATTENTION_KINDS]
    missing += [f"the feature map {name}" for name in maps if name not in FEATURE_MAP_KINDS]
    plugins = " or ".join(dotted((Path(name).name,)) for name in _plugins(tree).values())
    if missing and plugins:
        needs = f"needs {missing[0]} of the plug-in {plugins}"
        raise MissingPlugin(
            [f"{tree.file or 'the recipe'}: {needs}: load it by --plugin FILE, or in Python by lmlong.load_plugin."]
        )


def _plugins(tree: Tree) -> dict[int, str]:
    """Return the plug-ins that a recipe lists, by their index."""
    plugins = tree.values.get("plugins")
    listed = plugins if isinstance(plugins, list) else []
    return {number: name for number, name in enumerate(listed) if isinstance(name, str)}


def _read(file: Path) -> Tree:
    """Return the tree of a recipe file."""
    try:
        tree = _sections(file)
    except RecipeError:
        if file.suffix in SUFFIXES or not file.is_file() or not os.access(file, os.R_OK):
            raise
        remedy = f"To train on it: {_training_on(file, 'book')}"
        raise RecipeError([f"{file}: not a recipe (.yaml). {remedy}."]) from None
    tree.file = file
    tree.values.setdefault("name", file.stem)
    return tree


def _sections(file: Path) -> Tree:
    try:
        tree = parse_yaml(read_recipe_file(file))
    except BrokenYAML as error:
        raise RecipeError([f"{file}:{error.line}: broken YAML: {error}"]) from None
    if tree.values is None:
        raise RecipeError([f"{file}: the file is empty. A recipe needs at least training: {{steps: ...}}."])
    if not isinstance(tree.values, dict):
        raise RecipeError([f"{file}:1: a recipe is made of sections, such as training: {{steps: ...}}."])
    return tree


def _training_on(path: Path, recipe: str) -> str:
    """Return the command that trains on a text or a folder of texts."""
    return f"`lmlong train {recipe} {shlex.quote(f'text.sources.0.paths={path}')}`"


def _complete_from_start(values: dict[str, Any]) -> None:
    """Add the missing options of `model` and the missing tokenizer to the values of a recipe.

    Options are taken from the run of `training.init_from`, the tokenizer from that run or else from the teacher.
    A run that cannot be read is ignored here and reported when its weights are loaded.
    """
    start, teacher = (_recipe_of(at(values, ("training", key))) for key in ("init_from", "teacher"))
    tokenizer = at(start or teacher, ("text", "tokenizer"))
    defaults = {"model": at(start, ("model",)), "text": None if tokenizer is None else {"tokenizer": tokenizer}}
    for name, section in defaults.items():
        own = values.get(name, {})
        if isinstance(section, dict) and isinstance(own, dict):
            values[name] = section | own


def _recipe_of(run: object) -> Any:
    """Return the sections of the recipe in a run folder, a run under runs/ or a checkpoint, or None."""
    if not isinstance(run, str):
        return None
    for folder in (Path(run).expanduser(), RUNS / run):
        try:
            return parse_yaml((folder / RECIPE).read_text(encoding="utf-8")).values
        except (OSError, ValueError, BrokenYAML):
            continue
    return None
