"""The folder of a run: its lock, and checks before a run begins in it. Imports no torch."""

import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lmlong.checkpoint.location import BEST, LATEST, LEFT_FOLDER, NAME, checkpoints_in, find
from lmlong.checkpoint.manifest import EARLIER_TRAINING, FILES, RECIPE, TOKENIZER
from lmlong.checkpoint.manifest import NAME as MANIFEST
from lmlong.data.sources import check_quickly
from lmlong.errors import LmlongError, UsageError
from lmlong.io.files import parse_json
from lmlong.io.lock import Held, lock
from lmlong.recipe import Recipe
from lmlong.recipe.find import ENVIRONMENT, RUNS, resume_command
from lmlong.training.metrics_log import METRICS_FILE

LOCK = ".lock"

RECORDS = (ENVIRONMENT, RECIPE, TOKENIZER, METRICS_FILE)
"""The files that describe a run."""

ABANDONED = re.compile(r"abandoned-(\d+)")
"""Folders of checkpoints that were moved aside; each is itself a run folder."""

IN_CHECKPOINTS = (*FILES, EARLIER_TRAINING, MANIFEST)

OWN = re.compile(
    rf"({ABANDONED.pattern}/)*"
    rf"({'|'.join(map(re.escape, (LOCK, *RECORDS)))}|{re.escape(METRICS_FILE)}\.partial"
    rf"|\.({'|'.join(map(re.escape, RECORDS))})\.(lmlong-)?partial"
    rf"|checkpoints/(({NAME.pattern}|{LEFT_FOLDER.pattern})/({'|'.join(map(re.escape, IN_CHECKPOINTS))})?)?"
    r"|tensorboard/(events\.out\.tfevents\..*|hparams\.yaml)?"
    r"|csv/(from-\d{8,}/(metrics\.csv|hparams\.yaml)?)?"
    r"|wandb/(((offline-)?run-\d{8}_\d{6}-.*|latest-run|debug(-internal)?\.log|settings)(/.*)?)?)?"
)
"""The paths that a run uses in its folder; those of folders end with a slash."""

OWN_LINKS = re.compile(rf"({ABANDONED.pattern}/)*(checkpoints/({LATEST}|{BEST})|wandb/.*)")
"""Earlier versions linked the newest and the best checkpoint."""


def default_folder(recipe: Recipe) -> Path:
    """Return the default run folder of a recipe."""
    return RUNS / recipe.name


def folder_to_resume(recipe: str, out: Path | None, resume: str) -> Path | None:
    """Return `out`, or the run folder whose own recipe this file is; None if it is another recipe. Refuse to resume
    automatically in an `out` without a run by the recipe of another run."""
    own = Path(recipe).parent
    if Path(recipe).name != RECIPE or not (own / ENVIRONMENT).is_file():
        return out
    if resume == "auto" and out and not _is_run(out):
        raise UsageError(f"--out: {out} is not a run to resume. {recipe} is resumed by: {resume_command(own)}")
    return out or own


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a run folder against other training. The folder is created if missing, and removed again if it stays
    empty."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        with lock(folder / LOCK) as is_locked:
            if not is_locked:
                print(f"{folder}: its file system has no locks. Start no second training there.", file=sys.stderr)
            yield
    except Held:
        raise UsageError(
            f"{folder}: another process is training in it. Wait for it, stop it, or choose another folder by --out."
        ) from None
    except OSError as error:
        if error.filename is None or Path(error.filename) not in (folder / LOCK, folder, *folder.parents):
            raise
        raise UsageError(f"{folder}: cannot be written to ({error.strerror}). Choose another --out.") from None
    finally:
        for path in new:
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()


def check_sources(recipe: Recipe, resume: str | None = None) -> None:
    """Refuse a recipe whose text, initial run or teacher is missing."""
    for checkpoint in (resume if resume != "auto" else None, recipe.training.init_from, recipe.training.teacher):
        if checkpoint:
            find(checkpoint)
    check_quickly(recipe.text)


def is_locked(folder: Path) -> bool:
    """Return whether a run may be training in a folder; `locked` finds out."""
    return (folder / LOCK).exists()


def check_folder(folder: Path, recipe: Recipe, resume: str | None, overwrite: bool) -> None:
    """Refuse to train in a folder if that would replace the user's files, or a run without --overwrite."""
    if resume and overwrite:
        raise UsageError("--resume continues a run, --overwrite replaces it. Leave out one of them.")
    if not folder.is_dir():
        return
    if resume:
        _check_resumable(folder)
    elif overwrite:
        _check_replaceable(folder, recipe)
    elif any(path.name != LOCK for path in folder.iterdir()):
        remedy = f"Replace it with --overwrite, or choose another --out. Resume it by: {resume_command(folder)}"
        raise UsageError(f"{folder}: exists. {remedy if _is_run(folder) else 'Choose another --out.'}")


def _check_resumable(folder: Path) -> None:
    for name in RECORDS:
        if (folder / name).exists() and not _is_run(folder):
            raise UsageError(
                f"{folder / name}: not part of a run of lmlong, and training would replace it. Choose --out."
            )


def _check_replaceable(folder: Path, recipe: Recipe) -> None:
    for key, source in (("init_from", recipe.training.init_from), ("teacher", recipe.training.teacher)):
        if source and find(source, BEST).is_relative_to(folder.resolve()):
            raise UsageError(f"training.{key}: {source} is in {folder}, which --overwrite empties. Choose --out.")
    if any(path.name != LOCK for path in folder.iterdir()) and not _is_run(folder):
        raise UsageError(f"{folder}: not a run of lmlong, so --overwrite leaves it alone. Empty it, or choose --out.")
    for path in sorted(folder.rglob("*")):
        name, link = path.relative_to(folder).as_posix(), path.is_symlink()
        if path.is_dir() and not link:
            name += "/"
        if not (OWN_LINKS if link else OWN).fullmatch(name):
            raise UsageError(f"{path}: not part of a run, and --overwrite would delete it. Move it, or choose --out.")


def _is_run(folder: Path) -> bool:
    """Return whether training has begun here, which it records first of all, or has left a checkpoint."""
    try:
        about = parse_json((folder / ENVIRONMENT).read_bytes())
    except (OSError, ValueError):
        about = None
    noted = isinstance(about, dict) and isinstance(about.get("packages"), dict) and "lmlong" in about["packages"]
    return noted or bool(checkpoints_in(folder))


def check_exists(folder: Path) -> None:
    """Refuse to continue if the run folder is gone: a new folder of its name would hold only the rest of the run."""
    if not folder.is_dir():
        raise LmlongError(
            f"{folder}: the run folder was moved or removed while it trained. Resume from its last checkpoint by "
            "--resume auto, with --out naming its new place."
        )


def clear(folder: Path) -> None:
    """Remove a run, ending with the file that marks it as one; its lock stays."""
    for path in sorted(folder.iterdir(), key=lambda path: path.name == ENVIRONMENT):
        if path.name == LOCK:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
