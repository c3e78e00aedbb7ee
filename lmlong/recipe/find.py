"""Recipes by name or path: shipped ones, files, and those of runs."""

import os
import re
import shlex
from pathlib import Path
from typing import Any

from lmlong.errors import RecipeError, nearest
from lmlong.recipe.yaml import MAX_SIZE, BrokenYAML, Tree, parse_yaml

SUFFIXES = (".yaml", ".yml")

RECIPE = "recipe.yaml"
"""The file in a run folder or checkpoint that holds its recipe."""

ENVIRONMENT = "environment.json"
"""The file that marks a run folder."""

RUNS = Path("runs")
"""The folder of runs that are named by their recipes."""


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
    raise RecipeError([f"{name_or_path}: {'no such file' if is_path else 'no recipe with this name'}.{hint}"])


def resume_command(run: Path) -> str:
    """Return the command that resumes a run, with --threads if it began with it."""
    environment = run / ENVIRONMENT  # which holds the command that began the run
    begun = environment.read_text(encoding="utf-8", errors="replace") if environment.is_file() else ""
    threads = re.search(r"--threads\W+(\d+)", begun)
    words = ["lmlong", "train", str(run / RECIPE), "--resume", "auto"]
    return shlex.join(words + (["--threads", threads[1]] if threads else []))


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


def read_tree(file: Path) -> Tree:
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


def sections_of(run: object) -> Any:
    """Return the sections of the recipe in a run folder, a run under runs/ or a checkpoint, or None."""
    if not isinstance(run, str):
        return None
    for folder in (Path(run).expanduser(), RUNS / run):
        try:
            return parse_yaml((folder / RECIPE).read_text(encoding="utf-8")).values
        except (OSError, ValueError, BrokenYAML):
            continue
    return None
