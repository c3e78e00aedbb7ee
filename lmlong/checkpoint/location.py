"""Finding the checkpoint of a run by its folder, its name, or its own path. Imports no torch."""

import shlex
from pathlib import Path

from lmlong.checkpoint import manifest
from lmlong.errors import CheckpointError, nearest
from lmlong.io.links import follow_link

EXPORTED = ("modeling_lmlong.py", "model.onnx")
LATEST, BEST = "latest", "best"


def run_path(run: str | Path) -> Path:
    """Return the folder that a path or the name of a run under runs/ refers to; it may be missing."""
    path = Path(run)
    return Path("runs") / run if not path.exists() and (Path("runs") / run).exists() else path


def find(run: str | Path) -> Path:
    """Return the checkpoint of a run folder, of the name of a run under runs/, or of the checkpoint's own folder."""
    try:
        path = run_path(run)
        if not path.exists():
            runs = [folder.name for folder in Path("runs").glob("*/")]
            raise CheckpointError(f"{run}: no such run or checkpoint.{nearest(str(run).removeprefix('runs/'), runs)}")
        for link in (path, path / "checkpoints" / LATEST):
            if checkpoint := _follow(link):
                return checkpoint
    except OSError as error:
        raise CheckpointError(f"{error.filename or run}: cannot be read ({error.strerror}).") from error
    raise CheckpointError(f"{path}: {_why_not(path)}")


def _why_not(path: Path) -> str:
    """Return what a file or folder is that holds no checkpoint, and what to do about it."""
    if any((path / name).is_file() for name in EXPORTED):
        return "an export of a run, for other programs. Name the run that it was exported from."
    if path.suffix.lower() == ".gguf" or (path / "config.json").is_file():
        run = f"runs/{path.stem if path.is_file() else path.resolve().name}"
        words = ["lmlong", "import", str(path), "--out", run]
        return f"a model of another program. Import it first: {shlex.join(words)}, then name {run}."
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
