"""A first look at a run to be: mistakes that are told before anything slow, such as torch, is imported."""

from pathlib import Path

from lmlong.checkpoint.location import find
from lmlong.data.sources import check_quickly
from lmlong.errors import UsageError
from lmlong.recipe import Recipe

LOCK = ".lock"
"""The name of a run folder's lock."""


def default_folder(recipe: Recipe) -> Path:
    """Return the run folder of a recipe where no other is given."""
    return Path("runs") / recipe.name


def check(recipe: Recipe, folder: Path | None, resume: str | None, overwrite: bool) -> None:
    """Refuse what could not be trained: sources that are missing, or a `folder` that is no place for a new run."""
    check_options(resume, overwrite)
    # a lock means that a run is being trained there, which is told with the name of its process
    if folder and folder.is_dir() and not resume and not overwrite and not (folder / LOCK).exists():
        check_free(folder)
    for checkpoint in (resume if resume != "auto" else None, recipe.training.init_from, recipe.training.teacher):
        if checkpoint:
            find(checkpoint)
    check_quickly(recipe.text)


def check_options(resume: str | Path | None, overwrite: bool) -> None:
    if resume and overwrite:
        raise UsageError("--resume goes on with a run, --overwrite replaces it. Leave out one of them.")


def check_free(folder: Path) -> None:
    """Refuse to begin a run in a folder that holds anything."""
    if any(path.name != LOCK for path in folder.iterdir()):
        remedy = "Resume it with --resume auto, replace it with --overwrite, or choose --out."
        raise UsageError(f"{folder}: exists. {remedy}")
