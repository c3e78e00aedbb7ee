"""Recipes from files, found by name or path, or from dicts: checked with all mistakes told at once, and written."""

import io
import json
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PureWindowsPath
from typing import Any, NamedTuple

from pydantic import ValidationError
from ruamel.yaml import YAML

from lmlong.errors import RecipeError, UsageError, nearest, other_format
from lmlong.io.standard_input import path_of
from lmlong.recipe.kinds import ATTENTION_KINDS, FEATURE_MAP_KINDS, attention_words, plugins_needed
from lmlong.recipe.mistakes import mistakes
from lmlong.recipe.overrides import BadOverride, Override, from_item, parse, place
from lmlong.recipe.root import FORMAT, Recipe, recipe_class
from lmlong.recipe.start import with_start
from lmlong.recipe.yaml import LARGEST, BrokenYAML, Document, KeyPath, at, dotted

SUFFIXES = (".yaml", ".yml")

ATTENTION: KeyPath = ("model", "attention")


class MissingPlugin(RecipeError):
    """A recipe names a plug-in that nobody has loaded, and that may not be loaded for it."""


def shipped_recipes() -> dict[str, Path]:
    """Return the files of the recipes that come with lmlong, by name."""
    package = Path(__file__).parents[1]
    installed, checkout = package / "recipes", package.parent / "recipes"
    folder = installed if installed.is_dir() else checkout
    return {file.stem: file for file in sorted(folder.glob("*.yaml"))}


def find(name_or_path: str) -> Path:
    """Return the file of a shipped recipe, or the one at a path."""
    path, shipped = Path(name_or_path), shipped_recipes()
    if name_or_path in shipped:
        file = shipped[name_or_path]
        return file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
    if path.is_file():
        return path
    hint = nearest(path.stem, shipped) or f" Shipped recipes: {', '.join(shipped)}."
    if path.is_dir():
        remedy = "Name the recipe file in it, or train on its texts"
        raise RecipeError([f"{name_or_path}: is a folder. {remedy}: {_training_on(path, 'library')}."])
    if path.name != name_or_path or path.suffix in SUFFIXES:
        raise RecipeError([f"{name_or_path}: there is no such file.{hint}"])
    raise RecipeError([f"{name_or_path}: no recipe of that name.{hint}"])


def read(file: Path) -> str:
    """Return the text of a recipe file."""
    try:
        if file.stat().st_size > LARGEST:
            raise RecipeError([f"{file}: larger than any recipe. Name another file."])
        return file.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise RecipeError([f"{file}: cannot be read: {error.strerror}."]) from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise RecipeError([f"{file}:{line}: not UTF-8. Save the file in that encoding."]) from None


class Sections(NamedTuple):
    """The sections of a recipe given as a dict, where a file would give a `Document`."""

    values: dict[str, Any]

    @property
    def mistakes(self) -> list[tuple[KeyPath, int, str]]:
        return []

    def line(self, path: KeyPath) -> tuple[int, bool]:
        """Return no line, and whether there is a value."""
        return 0, at(self.values, path) is not None


def load(
    source: str | Path | Mapping[str, Any],
    overrides: Sequence[str] | Mapping[str, Any] = (),
    load_plugin: Callable[[str], object] | None = None,
    as_trained: bool = False,
) -> Recipe:
    """Load a recipe from a file or from a dict of sections, with overrides of its values (key.path=value, or values by
    their key.path), and its paths made absolute. What it says nothing of is as in the run of training.init_from, if
    any, or else has its default; of a recipe `as_trained` all is in it.

    Its plug-ins are loaded by `load_plugin`. Without it nothing is ever imported: a recipe from a stranger, such as
    that of a checkpoint, then needs the plug-ins to be loaded already.
    """
    file: Path | None = None
    document: Document | Sections
    if isinstance(source, Mapping):
        document = Sections(dict(source))
    else:
        file = find(str(source))
        document = _compose(file)
    # Where there is no training section, the message that helps is the one about its missing steps.
    values = ({"name": file.stem} if file else {}) | {"training": {}} | document.values
    values, placed, misplaced = _place_all(values, overrides)
    values = values if as_trained else with_start(values)
    prefix = f"{file}: " if file else ""
    if type(version := values.get("format", FORMAT)) is not int or version < 1:
        raise RecipeError([f"{prefix}format: expected {FORMAT}, got {version!r}. Write format: {FORMAT}."])
    if version != FORMAT:
        raise RecipeError([other_format(file or "the recipe", version, FORMAT)])
    _load_plugins(file, document, values, placed, load_plugin)
    wrong: dict[KeyPath, str] = {}
    try:
        recipe = recipe_class(plugins_needed(at(values, ATTENTION))).model_validate(values)
    except ValidationError as error:
        wrong = mistakes(error, values, recipe_class(), suggest_paths=True)
    if messages := _located(file, document, placed, wrong) + misplaced:
        raise RecipeError(messages)
    return with_absolute_paths(recipe)


def with_absolute_paths(recipe: Recipe) -> Recipe:
    """Return a recipe whose paths mean the same when it is read in another folder. Of plug-ins it names those that the
    model is made of: a checkpoint needs no others."""
    values = _anchored(recipe.model_dump())
    needed = plugins_needed(at(values, ATTENTION))
    return recipe_class(needed).model_validate({**values, "plugins": list(needed)})


def is_file(plugin: str) -> bool:
    """Return whether a plug-in is named by its Python file, and not as an entry point."""
    return plugin.endswith(".py") or os.sep in plugin


def dump(recipe: Recipe) -> str:
    """Return a recipe as YAML with every key, which `load` reads back as the same recipe."""
    return _yaml(recipe.model_dump())


def dump_without_folders(recipe: Recipe) -> str:
    """Return a recipe as YAML that names files without the folders they are in, to be shown to others."""
    values = recipe.model_dump()
    values["plugins"] = [_name(plugin, is_file(plugin)) for plugin in values["plugins"]]
    if values["training"]["deepspeed"]["config"]:
        values["training"]["deepspeed"]["config"] = _name(values["training"]["deepspeed"]["config"], True)
    return _yaml(_with_paths(values, _name))


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


def _compose(file: Path) -> Document:
    """Return the document in a file, which must hold sections."""
    try:
        return _parse(file)
    except RecipeError:
        if file.suffix in SUFFIXES or not file.is_file() or not os.access(file, os.R_OK):
            raise
        remedy = f"To train on it: {_training_on(file, 'book')}"
        raise RecipeError([f"{file}: is a text or other file, not a recipe (.yaml). {remedy}."]) from None


def _training_on(path: Path, recipe: str) -> str:
    """Return the command that trains on a text or a folder of texts."""
    return f"`lmlong train {recipe} {shlex.quote(f'text.sources.0.paths={path}')}`"


def _parse(file: Path) -> Document:
    try:
        document = Document(read(file))
    except BrokenYAML as error:
        raise RecipeError([f"{file}:{error.line}: broken YAML: {error}"]) from None
    if document.values is None:
        raise RecipeError([f"{file}: the file is empty. A recipe needs at least training: {{steps: ...}}."])
    if not isinstance(document.values, dict):
        raise RecipeError([f"{file}:1: a recipe is made of sections, such as training: {{steps: ...}}."])
    return document


def _load_plugins(
    file: Path | None,
    document: Document | Sections,
    values: dict[str, Any],
    placed: list[Override],
    load_plugin: Callable[[str], object] | None,
) -> None:
    """Load the plug-ins that a recipe lists, or refuse a recipe whose attention is of one that may not be loaded."""
    plugins = values.get("plugins")
    listed = plugins if isinstance(plugins, list) else []
    named = {number: name for number, name in enumerate(listed) if isinstance(name, str)}
    if load_plugin is None:
        kinds, maps = attention_words(at(values, ATTENTION))
        missing = [f"the attention {kind}" for kind in kinds if kind not in ATTENTION_KINDS]
        missing += [f"the feature map {name}" for name in maps if name not in FEATURE_MAP_KINDS]
        if missing and named:
            homes = " or ".join(dotted((Path(name).name,)) for name in named.values())
            raise MissingPlugin(
                [
                    f"{file or 'the recipe'}: needs {missing[0]} of the plug-in {homes}: name it by --plugin FILE, in "
                    "Python by lmlong.load_plugin."
                ]
            )
        return
    for number, name in named.items():
        override = _cause(("plugins", number), document, placed)
        folder = file.parent if file and not override else Path()
        try:
            load_plugin(_absolute(folder / Path(name).expanduser()) if is_file(name) else name)
        except UsageError as error:
            line, _ = document.line(("plugins", number))
            where = f"{override.text}: " if override else f"{file}:{line}: " if file else ""
            raise RecipeError([f"{where}plugins.{number}: {error}"]) from None


def _place_all(
    values: dict[str, Any], overrides: Sequence[str] | Mapping[str, Any]
) -> tuple[dict[str, Any], list[Override], list[str]]:
    """Return the values with the overrides applied, the overrides, and the mistakes of those that fit nowhere."""
    placed: list[Override] = []
    misplaced: list[str] = []
    for given in overrides.items() if isinstance(overrides, Mapping) else overrides:
        try:
            override = parse(given) if isinstance(given, str) else from_item(*given)
            values = place(values, override)
            placed.append(override)
        except BadOverride as error:
            misplaced.append(str(error))
    return values, placed, misplaced


def _located(
    file: Path | None, document: Document | Sections, placed: list[Override], wrong: dict[KeyPath, str]
) -> list[str]:
    """Return one message for each mistake: those in the file by line, then those in the overrides in their order."""

    def told(line: int, path: KeyPath, message: str) -> str:
        return (f"{file}:{line}: " if file else "") + f"{dotted(path)}: {message}"

    found = [
        ((0, line), told(line, path, message))
        for path, line, message in document.mistakes
        if not any(override.sets(path) for override in placed)
    ]
    for path, message in wrong.items():
        if override := _cause(path, document, placed):
            key = "" if override.sets(path) and override.lies_in(path) else f"{dotted(path)}: "
            found.append(((1, placed.index(override)), f"{override.text}: {key}{message}"))
        else:
            line, _ = document.line(path)
            found.append(((0, line), told(line, path, message)))
    return [text for _, text in sorted(found, key=lambda mistake: mistake[0])]


def _cause(path: KeyPath, document: Document | Sections, placed: list[Override]) -> Override | None:
    """Return the override that causes a mistake at `path`, or None where the file does."""
    _, in_file = document.line(path[:-1])
    for override in reversed(placed):
        if override.sets(path) or override.lies_in(path) or (not in_file and override.lies_in(path[:-1])):
            return override
    return None


def _anchored(values: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe's values with absolute paths, so that they mean the same when read in another folder."""

    def anchored(path: str, is_path: bool) -> str:
        return _absolute(path_of(path)) if is_path or Path(path).expanduser().exists() else path

    return _with_paths(values, anchored)


def _with_paths(values: dict[str, Any], change: Callable[[str, bool], str]) -> dict[str, Any]:
    """Change each path of a recipe's values, given whether it is one for certain; another may be the name of a data set
    or of a run."""
    text, training = values["text"], values["training"]
    for source in text["sources"] + text["validation"]["sources"]:
        if source["kind"] == "files":
            source["paths"] = [change(path, True) for path in source["paths"]]
        if source["kind"] == "hub":
            source["dataset"] = change(source["dataset"], False)
    if text["tokenizer"]["path"] is not None:
        text["tokenizer"]["path"] = change(text["tokenizer"]["path"], True)
    for key in ("init_from", "teacher"):
        if training[key] is not None:
            training[key] = change(training[key], False)
    return values


def _name(path: str, is_path: bool) -> str:
    """Return the last part of a path of any system."""
    parsed = PureWindowsPath(path)  # which separates by / too
    return parsed.name or path if is_path or parsed.root or parsed.drive or path.startswith("~") else path


def _absolute(path: str | Path) -> str:
    return os.path.abspath(os.path.expanduser(path))
