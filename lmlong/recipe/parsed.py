"""Recipes before validation, from files found by name or path or from dicts, with overrides applied.

Each value keeps its line or override, where mistakes in it are reported.
"""

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from lmlong.errors import RecipeError, UsageError, nearest, other_format
from lmlong.recipe.kinds import ATTENTION_KINDS, FEATURE_MAP_KINDS, attention_words
from lmlong.recipe.overrides import BadOverride, sets, with_item, with_override
from lmlong.recipe.paths import absolute, is_file
from lmlong.recipe.yaml import (
    MAX_SIZE,
    UNREADABLE,
    BrokenYAML,
    KeyPath,
    Mistake,
    ParsedYAML,
    Section,
    at,
    dotted,
    origin_of,
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
        name = at(_recipe_of(str(path)), ("name",))
        raise RecipeError([f"{name_or_path}: is a run. Resume it by: {resume_command(path, str(name))}"])
    if path.is_dir():
        remedy = "Name the recipe file in it, or train on its texts"
        raise RecipeError([f"{name_or_path}: is a folder, not a recipe. {remedy}: {_training_on(path, 'library')}."])
    is_path = path.name != name_or_path or path.suffix in SUFFIXES
    other = next((file for suffix in SUFFIXES if (file := path.with_suffix(suffix)).is_file()), None)
    if path.suffix in SUFFIXES and other:
        hint = f" Did you mean '{other}'?"
    raise RecipeError([f"{name_or_path}: {'there is no such file' if is_path else 'no recipe of that name'}.{hint}"])


def resume_command(run: Path, name: str) -> str:
    """Return the command that resumes a run whose recipe has this name."""
    out = [] if run == RUNS / name else ["--out", str(run)]
    return shlex.join(["lmlong", "train", str(run / RECIPE), *out, "--resume", "auto"])


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


class ParsedRecipe(NamedTuple):
    """The values of a recipe before validation, with the file and the overrides that they come from."""

    file: Path | None
    values: Section
    mistakes: list[Mistake]
    """Mistakes in the YAML of the file."""
    overrides: list[str]
    rejected: list[str]
    """Messages for overrides that cannot be applied."""

    def load_plugins(self, load_plugin: Callable[[str], object]) -> None:
        """Load the plug-ins that the recipe lists; files are relative to the recipe's folder."""
        for number, name in self._plugins.items():
            path = ("plugins", number)
            in_file = self.file is not None and isinstance(origin_of(self.values, path, 1), int)
            folder = self.file.parent if self.file and in_file else Path()
            try:
                load_plugin(absolute(folder / Path(name).expanduser()) if is_file(name) else name)
            except UsageError as error:
                raise RecipeError([self._message(self._mistake_at(path, str(error)))]) from None

    def check_plugins(self) -> None:
        """Raise `MissingPlugin` if the recipe lists plug-ins and its attention needs one that is not loaded."""
        kinds, maps = attention_words(at(self.values, ATTENTION))
        missing = [f"the attention {kind}" for kind in kinds if kind not in ATTENTION_KINDS]
        missing += [f"the feature map {name}" for name in maps if name not in FEATURE_MAP_KINDS]
        if missing and self._plugins:
            plugins = " or ".join(dotted((Path(name).name,)) for name in self._plugins.values())
            needs = f"needs {missing[0]} of the plug-in {plugins}"
            raise MissingPlugin(
                [f"{self.file or 'the recipe'}: {needs}: load it by --plugin FILE, or in Python by lmlong.load_plugin."]
            )

    def messages(self, wrong: Mapping[KeyPath, str]) -> list[str]:
        """Return one message for each mistake: first those in the file by line, then those in overrides in their order.

        `wrong` holds the mistakes found by validation.
        """
        mistakes = [each for each in self.mistakes if not any(sets(override, each.path) for override in self.overrides)]
        mistakes += [self._mistake_at(path, message) for path, message in wrong.items()]
        return [self._message(mistake) for mistake in sorted(mistakes, key=self._position)] + self.rejected

    @property
    def _plugins(self) -> dict[int, str]:
        """The plug-ins that the recipe lists, by their index."""
        plugins = self.values.get("plugins")
        listed = plugins if isinstance(plugins, list) else []
        return {number: name for number, name in enumerate(listed) if isinstance(name, str)}

    def _mistake_at(self, path: KeyPath, message: str) -> Mistake:
        return Mistake(path, origin_of(self.values, path, 1), message)

    def _position(self, mistake: Mistake) -> tuple[int, int]:
        if isinstance(mistake.origin, str):
            return 1, self.overrides.index(mistake.origin)
        return 0, mistake.origin

    def _message(self, mistake: Mistake) -> str:
        key, origin = dotted(mistake.path), mistake.origin
        if isinstance(origin, int):
            return (f"{self.file}:{origin}: " if self.file else "") + f"{key}: {mistake.message}"
        return f"{origin}: " + ("" if origin.startswith(f"{key}=") else f"{key}: ") + mistake.message


def parse_recipe(
    source: str | Path | Mapping[str, Any],
    overrides: Sequence[str] | Mapping[str, Any],
    as_trained: bool = False,
) -> ParsedRecipe:
    """Parse a recipe from a file or from a dict of sections, and apply overrides.

    Missing values are taken from the run of training.init_from; a recipe `as_trained` is complete.
    """
    file = None if isinstance(source, Mapping) else find_recipe(str(source))
    document = _document(file) if file else ParsedYAML(source, [])
    values = Section(({"name": file.stem} if file else {}) | document.values, getattr(document.values, "origins", {}))
    applied, rejected = [], []
    for given in overrides.items() if isinstance(overrides, Mapping) else overrides:
        text = given if isinstance(given, str) else f"{given[0]}={given[1]!r}"
        try:
            values = with_override(values, text) if isinstance(given, str) else with_item(values, *given, text)
            applied.append(text)
        except BadOverride as error:
            rejected.append(str(error))
    values = values if as_trained else _with_start(values)
    version, where = values.get("format", FORMAT), file or "the recipe"
    if version is not UNREADABLE and (type(version) is not int or version < 1):
        raise RecipeError([f"{where}: format: expected {FORMAT}, got {version!r}. Write format: {FORMAT}."])
    if type(version) is int and version != FORMAT:
        raise RecipeError([other_format(where, version, FORMAT)])
    return ParsedRecipe(file, values, document.mistakes, applied, rejected)


def _document(file: Path) -> ParsedYAML:
    """Return the YAML document in a file, which must hold sections."""
    try:
        return _sections(file)
    except RecipeError:
        if file.suffix in SUFFIXES or not file.is_file() or not os.access(file, os.R_OK):
            raise
        remedy = f"To train on it: {_training_on(file, 'book')}"
        raise RecipeError([f"{file}: not a recipe (.yaml). {remedy}."]) from None


def _sections(file: Path) -> ParsedYAML:
    try:
        document = parse_yaml(read_recipe_file(file))
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


def _with_start(values: Section) -> Section:
    """Return the values of a recipe with its missing options of `model` and its missing tokenizer filled in.

    Options are taken from the run of `training.init_from`, the tokenizer from that run or else from the teacher.
    A run that cannot be read is ignored here and reported when its weights are loaded.
    """
    start, teacher = (_recipe_of(at(values, ("training", key))) for key in ("init_from", "teacher"))
    tokenizer = at(start or teacher, ("text", "tokenizer"))
    values = _with_defaults(values, "model", at(start, ("model",)))
    return _with_defaults(values, "text", None if tokenizer is None else {"tokenizer": tokenizer})


def _recipe_of(run: object) -> Any:
    """Return the sections of the recipe in a run folder, a run under runs/ or a checkpoint, or None."""
    if not isinstance(run, str):
        return None
    for folder in (Path(run).expanduser(), Path("runs") / run):
        try:
            return parse_yaml((folder / RECIPE).read_text(encoding="utf-8")).values
        except (OSError, ValueError, BrokenYAML):
            continue
    return None


def _with_defaults(values: Section, name: str, defaults: Any) -> Section:
    """Return values whose section `name` has defaults for its missing keys."""
    section = values.get(name, {})
    if not isinstance(section, dict) or not isinstance(defaults, dict):
        return values
    completed = Section({**defaults, **section}, getattr(section, "origins", {}))
    return Section({**values, name: completed}, values.origins)
