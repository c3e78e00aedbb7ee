"""Finding the checkpoints of a run by its folder, its name, or a checkpoint's path. Imports no torch."""

import re
import shlex
from pathlib import Path

from lmlong.checkpoint import manifest
from lmlong.checkpoint.manifest import Manifest
from lmlong.errors import CheckpointError, nearest

EXPORTED = ("modeling_lmlong.py",)
MOST_LISTED = 5
LATEST, BEST = "latest", "best"
NAME = re.compile(r"step-(\d{8,})")
"""The names of checkpoints; everything else beside them belongs to the user and is left alone."""
LEFT_FOLDER = re.compile(r"\.step-\d{8,}\.(partial|removed)")
"""Leftovers of a process that was stopped while it wrote or removed a checkpoint."""


def run_path(run: str | Path) -> Path:
    """Return the folder that a path or the name of a run under runs/ refers to; it may be missing."""
    path, named = Path(run), Path("runs") / run
    return named if not _split(path)[0].exists() and _split(named)[0].exists() else path


def _split(path: Path) -> tuple[Path, str | None]:
    """Split RUN/checkpoints/latest or best into the run and the word, which is a name and not a file."""
    is_choice = path.name in (LATEST, BEST) and path.parent.name == "checkpoints"
    return (path.parents[1], path.name) if is_choice else (path, None)


def folder_of(run: str | Path) -> Path:
    """Return the run folder of a path or name that refers to a run or one of its checkpoints; it may be missing."""
    path = run_path(run)
    return path.parents[1] if path.parent.name == "checkpoints" else path


def find(run: str | Path, which: str = LATEST) -> Path:
    """Return a checkpoint of a run, given as a folder or a name under runs/: the newest, or with BEST the one of the
    lowest validation, if there was a validation. A checkpoint's own folder is that checkpoint, and a run's folder
    followed by checkpoints/latest or checkpoints/best chooses as `which` does.

    A run resumes from the newest; `read.reading`, by which all else is loaded, takes the best.
    """
    try:
        path, chosen = _split(run_path(run))
        if not path.exists():
            raise CheckpointError(f"{run}: no such run or checkpoint.{_runs_near(path)}")
        if (path / manifest.NAME).is_file():
            return path.resolve()
        if checkpoint := _choose(path, chosen or which):
            return checkpoint
    except OSError as error:
        raise CheckpointError(f"{error.filename or run}: cannot be read ({error.strerror}).") from error
    raise CheckpointError(f"{path}: {_why_not(path)}")


def choice(run: str | Path) -> str:
    """Return a line that names the checkpoint loaded from a run; an empty string if its newest one is loaded."""
    best, newest = find(run, BEST), find(run)
    if best == newest:
        return ""
    path = f"{run}/checkpoints/{LATEST}"
    return f"{run}: loads {best.name}, the best by validation, not the newest, {newest.name} ({path})"


def _runs_near(missing: Path) -> str:
    """Return a hint at the runs in the folder of a missing one: the nearest name, or a few names."""
    folder = Path("runs") if missing.parent == Path() else missing.parent
    runs = sorted(found.parent.name for found in folder.glob("*/checkpoints"))
    listed = ", ".join(runs[:MOST_LISTED]) + (f" and {rest} more" if (rest := len(runs) - MOST_LISTED) > 0 else "")
    return nearest(missing.name, runs) or (f" {folder} has {listed}." if runs else "")


def checkpoints_in(run: Path) -> list[Path]:
    """Return the checkpoints of a run folder from the oldest to the newest."""
    return sorted(filter(_is_checkpoint, (run / "checkpoints").glob("step-*")), key=step_of)


def best_of(checkpoints: list[Path]) -> tuple[Path, float] | None:
    """Return the checkpoint of the lowest validation, the oldest on ties, and its validation; None if none has one."""
    known = {path: about.validation for path in checkpoints if (about := read_manifest(path))}
    losses = {path: loss for path, loss in known.items() if loss is not None}
    best = min(losses, key=losses.__getitem__, default=None)
    return None if best is None else (best, losses[best])


def read_manifest(checkpoint: Path) -> Manifest | None:
    """Return the manifest of a checkpoint; None if it cannot be read."""
    try:
        return manifest.read(checkpoint)
    except (CheckpointError, OSError):
        return None


def _choose(run: Path, which: str) -> Path | None:
    """Return the newest or the best checkpoint of a run folder; None if it has none.

    Training writes a new checkpoint before it removes an old one. If the chosen one has been removed, choose again
    until the checkpoints no longer change.
    """
    before = None
    while (checkpoints := checkpoints_in(run)) != before:
        best = best_of(checkpoints) if which == BEST else None
        chosen = best[0] if best else checkpoints[-1] if checkpoints else None
        if chosen and chosen.is_dir():
            return chosen.resolve()
        before = checkpoints
    return None


def step_of(checkpoint: Path) -> int:
    """Return the step in the name of a checkpoint."""
    return int(checkpoint.name.removeprefix("step-"))


def _is_checkpoint(path: Path) -> bool:
    """Return whether this is a checkpoint of the step in its name, or a damaged one, which is reported when it is
    read."""
    if not NAME.fullmatch(path.name) or path.is_symlink() or not path.is_dir():
        return False
    about = read_manifest(path)
    return about.step == step_of(path) if about else path.is_dir()  # training may have removed it meanwhile


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
