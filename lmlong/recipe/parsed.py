"""Recipes before validation: files, found by name or path, or dicts, with overrides applied.

Each value's line or override is kept, so that a mistake in it can be reported there.
"""

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from lmlong.errors import RecipeError, UsageError, nearest, other_format
from lmlong.recipe.kinds import ATTENTION_KINDS, FEATURE_MAP_KINDS, attention_words
from lmlong.recipe.overrides import BadOverride, Override, from_item, parse, place
from lmlong.recipe.paths import absolute, is_file
from lmlong.recipe.start import with_start
from lmlong.recipe.yaml import LARGEST, BrokenYAML, Document, KeyPath, at, dotted

FORMAT: Literal[1] = 1
SUFFIXES = (".yaml", ".yml")
ATTENTION: KeyPath = ("model", "attention")


class MissingPlugin(RecipeError):
    """A recipe needs a plug-in that is not loaded, and that it may not load by itself."""


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
    """The sections of a recipe given as a dict, with the interface of a `Document`."""

    values: dict[str, Any]

    @property
    def mistakes(self) -> list[tuple[KeyPath, int, str]]:
        return []

    def line(self, path: KeyPath) -> tuple[int, bool]:
        """Return no line, and whether there is a value."""
        return 0, at(self.values, path) is not None


class ParsedRecipe(NamedTuple):
    """The values of a recipe before validation, with the file and the overrides that they come from."""

    file: Path | None
    document: Document | Sections
    values: dict[str, Any]
    overrides: list[Override]
    misplaced: list[str]
    """Messages for overrides that cannot be applied."""

    def load_plugins(self, load_plugin: Callable[[str], object]) -> None:
        """Load the plug-ins that the recipe lists; files are relative to the recipe's folder."""
        for number, name in self._plugins.items():
            override = self._override_at(("plugins", number))
            folder = self.file.parent if self.file and not override else Path()
            try:
                load_plugin(absolute(folder / Path(name).expanduser()) if is_file(name) else name)
            except UsageError as error:
                line, _ = self.document.line(("plugins", number))
                where = f"{override.text}: " if override else f"{self.file}:{line}: " if self.file else ""
                raise RecipeError([f"{where}plugins.{number}: {error}"]) from None

    def check_plugins(self) -> None:
        """Raise `MissingPlugin` if the recipe lists plug-ins and its attention needs one that is not loaded."""
        kinds, maps = attention_words(at(self.values, ATTENTION))
        missing = [f"the attention {kind}" for kind in kinds if kind not in ATTENTION_KINDS]
        missing += [f"the feature map {name}" for name in maps if name not in FEATURE_MAP_KINDS]
        if missing and self._plugins:
            plugins = " or ".join(dotted((Path(name).name,)) for name in self._plugins.values())
            raise MissingPlugin(
                [
                    f"{self.file or 'the recipe'}: needs {missing[0]} of the plug-in {plugins}: name it by --plugin "
                    "FILE, in Python by lmlong.load_plugin."
                ]
            )

    def messages(self, wrong: dict[KeyPath, str]) -> list[str]:
        """Return one message for each mistake: those in the file by line, then those in overrides in their order.

        `wrong` holds the mistakes that validation has found.
        """
        found = [
            ((0, line), self._located(line, path, message))
            for path, line, message in self.document.mistakes
            if not any(override.sets(path) for override in self.overrides)
        ]
        for path, message in wrong.items():
            if override := self._override_at(path):
                key = "" if override.sets(path) and override.lies_in(path) else f"{dotted(path)}: "
                found.append(((1, self.overrides.index(override)), f"{override.text}: {key}{message}"))
            else:
                line, _ = self.document.line(path)
                found.append(((0, line), self._located(line, path, message)))
        return [text for _, text in sorted(found, key=lambda mistake: mistake[0])] + self.misplaced

    @property
    def _plugins(self) -> dict[int, str]:
        """The plug-ins that the recipe lists, by their index."""
        plugins = self.values.get("plugins")
        listed = plugins if isinstance(plugins, list) else []
        return {number: name for number, name in enumerate(listed) if isinstance(name, str)}

    def _located(self, line: int, path: KeyPath, message: str) -> str:
        return (f"{self.file}:{line}: " if self.file else "") + f"{dotted(path)}: {message}"

    def _override_at(self, path: KeyPath) -> Override | None:
        """Return the override that a mistake at `path` comes from, or None if it comes from the file."""
        _, in_file = self.document.line(path[:-1])
        for override in reversed(self.overrides):
            if override.sets(path) or override.lies_in(path) or (not in_file and override.lies_in(path[:-1])):
                return override
        return None


def parse_recipe(
    source: str | Path | Mapping[str, Any],
    overrides: Sequence[str] | Mapping[str, Any],
    as_trained: bool = False,
) -> ParsedRecipe:
    """Parse a recipe from a file or from a dict of sections, and apply overrides.

    Missing values are taken from the run of training.init_from; a recipe `as_trained` is complete.
    """
    file: Path | None = None
    document: Document | Sections
    if isinstance(source, Mapping):
        document = Sections(dict(source))
    else:
        file = find(str(source))
        document = _document(file)
    # An empty training section yields the message about its missing steps, which helps most.
    values = ({"name": file.stem} if file else {}) | {"training": {}} | document.values
    values, placed, misplaced = _with_overrides(values, overrides)
    values = values if as_trained else with_start(values)
    prefix = f"{file}: " if file else ""
    if type(version := values.get("format", FORMAT)) is not int or version < 1:
        raise RecipeError([f"{prefix}format: expected {FORMAT}, got {version!r}. Write format: {FORMAT}."])
    if version != FORMAT:
        raise RecipeError([other_format(file or "the recipe", version, FORMAT)])
    return ParsedRecipe(file, document, values, placed, misplaced)


def _document(file: Path) -> Document:
    """Return the YAML document in a file, which must hold sections."""
    try:
        return _parse(file)
    except RecipeError:
        if file.suffix in SUFFIXES or not file.is_file() or not os.access(file, os.R_OK):
            raise
        remedy = f"To train on it: {_training_on(file, 'book')}"
        raise RecipeError([f"{file}: is a text or other file, not a recipe (.yaml). {remedy}."]) from None


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


def _training_on(path: Path, recipe: str) -> str:
    """Return the command that trains on a text or a folder of texts."""
    return f"`lmlong train {recipe} {shlex.quote(f'text.sources.0.paths={path}')}`"


def _with_overrides(
    values: dict[str, Any], overrides: Sequence[str] | Mapping[str, Any]
) -> tuple[dict[str, Any], list[Override], list[str]]:
    """Return the values with overrides, the overrides applied, and messages for those that cannot be applied."""
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
