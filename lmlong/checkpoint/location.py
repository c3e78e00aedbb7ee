"""Finding the checkpoints of a run by its folder, its name, or a checkpoint's path. Imports no torch."""

import re
import shlex
from pathlib import Path

from lmlong.checkpoint import manifest
from lmlong.errors import CheckpointError, nearest
from lmlong.io.links import follow_link

EXPORTED = ("modeling_lmlong.py",)
MOST_LISTED = 5
LATEST, BEST = "latest", "best"
NAME = re.compile(r"step-(\d{8,})")
"""The names of checkpoints; everything else beside them belongs to the user and is left alone."""
LEFT_FOLDER = re.compile(r"\.step-\d{8,}\.(partial|removed)")
LEFT_LINK = re.compile(r"\.(latest|best)\.partial")
"""Leftovers of a process that was stopped while it wrote or removed a checkpoint or a link to one."""


def run_path(run: str | Path) -> Path:
    """Return the folder that a path or the name of a run under runs/ refers to; it may be missing."""
    path = Path(run)
    return Path("runs") / run if not path.exists() and (Path("runs") / run).exists() else path


def folder_of(run: str | Path) -> Path:
    """Return the run folder of a path or name that refers to a run or one of its checkpoints; it may be missing."""
    path = run_path(run)
    return path.parents[1] if path.parent.name == "checkpoints" else path


def find(run: str | Path, which: str = LATEST) -> Path:
    """Return a checkpoint of a run, given as a folder or a name under runs/: the newest, or with BEST the one of the
    lowest validation, if there was a validation. A checkpoint's own folder is that checkpoint.

    A run resumes from the newest; `read.reading`, by which all else is loaded, takes the best.
    """
    try:
        path = run_path(run)
        if not path.exists():
            raise CheckpointError(f"{run}: no such run or checkpoint.{_runs_near(path)}")
        for link in (path, path / "checkpoints" / which, path / "checkpoints" / LATEST):
            if checkpoint := _follow(link):
                return checkpoint
    except OSError as error:
        raise CheckpointError(f"{error.filename or run}: cannot be read ({error.strerror}).") from error
    raise CheckpointError(f"{path}: {_why_not(path)}")


def choice(run: str | Path, which: str) -> str:
    """Return a line that names the checkpoint loaded from a run; an empty string if its newest one is the best."""
    best, newest = find(run, BEST), find(run)
    if best == newest:
        return ""
    if which == BEST:
        return f"{run}: loads {best.name}, the best by validation, not the newest, {newest.name} (--checkpoint latest)"
    return f"{run}: loads {newest.name}, the newest, not the best by validation, {best.name} (--checkpoint best)"


def _runs_near(missing: Path) -> str:
    """Return a hint at the runs in the folder of a missing one: the nearest name, or a few names."""
    folder = Path("runs") if missing.parent == Path() else missing.parent
    runs = sorted(found.parent.name for found in folder.glob("*/checkpoints"))
    listed = ", ".join(runs[:MOST_LISTED]) + (f" and {rest} more" if (rest := len(runs) - MOST_LISTED) > 0 else "")
    return nearest(missing.name, runs) or (f" {folder} has {listed}." if runs else "")


def checkpoints_in(run: Path) -> list[Path]:
    """Return the checkpoints of a run folder from the oldest to the newest."""
    return sorted(filter(_is_checkpoint, (run / "checkpoints").glob("step-*")), key=step_of)


def step_of(checkpoint: Path) -> int:
    """Return the step in the name of a checkpoint."""
    return int(checkpoint.name.removeprefix("step-"))


def _is_checkpoint(path: Path) -> bool:
    """Return whether this is a checkpoint of the step in its name, or a damaged one, which is reported when a run would
    resume from it."""
    if not NAME.fullmatch(path.name) or path.is_symlink() or not path.is_dir():
        return False
    try:
        return manifest.read(path).step == step_of(path)
    except (CheckpointError, OSError):
        return True


def _why_not(path: Path) -> str:
    """Return what a path without a checkpoint is, and what to do about it."""
    if any((path / name).is_file() for name in EXPORTED):
        return "an export for other programs. Name the run that it was exported from."
    if path.suffix.lower() == ".gguf" or (path / "config.json").is_file():
        run = f"runs/{path.stem if path.is_file() else path.resolve().name}"
        words = ["lmlong", "import", str(path), "--out", run]
        return f"a model of another program. Import it first: {shlex.join(words)}, then name {run}."
    if path.is_file() and (path.parent / manifest.NAME).is_file():
        return f"a file of a checkpoint. Name its folder, {path.parent}."
    return "holds no checkpoint. Train it first, or name another run."


def _follow(link: Path) -> Path | None:
    """Return the checkpoint at `link`, following a symbolic link; None if neither is a checkpoint.

    Training repoints the link to a new checkpoint before it removes the old one. If the target has been removed, follow
    the link again until the target no longer changes.
    """
    before = None
    while (checkpoint := follow_link(link).resolve()) != before:
        if (checkpoint / manifest.NAME).is_file():
            return checkpoint
        before = checkpoint
    return None
