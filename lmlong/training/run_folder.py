"""The folder of a run: its lock, what may be replaced in it, and the record of the run."""

import json
import platform
import re
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import torch

from lmlong import recipe
from lmlong.attention.plugins import LOADED
from lmlong.checkpoint import manifest, write
from lmlong.checkpoint.location import find
from lmlong.checkpoint.manifest import RECIPE, TOKENIZER
from lmlong.errors import UsageError
from lmlong.io.files import atomic_write, parse_json
from lmlong.io.links import is_link
from lmlong.io.lock import Held, Lock
from lmlong.model.base import count_parameters
from lmlong.recipe import Training
from lmlong.recipe import file as recipe_file
from lmlong.training.checkpoint_store import NAME, CheckpointStore
from lmlong.training.first_look import LOCK
from lmlong.training.setup import Setup

PACKAGES = ("lmlong", "torch", "lightning", "sentencepiece", "safetensors", "numpy")

ENVIRONMENT, METRICS = "environment.json", "metrics.jsonl"

BRANCH = re.compile(r"abandoned-(\d+)")
"""Folders of the checkpoints of an abandoned history; each is a run folder by itself."""

OF_LOGGERS = ("tensorboard", "csv", "wandb")
"""The folders of loggers."""

OWN = {
    "": re.compile(
        rf"\{LOCK}|{RECIPE}|{TOKENIZER}|{ENVIRONMENT}|{METRICS}(\.partial)?|\.[a-z.]+\.partial|checkpoints|{'|'.join(OF_LOGGERS)}|{BRANCH.pattern}"
    ),
    "checkpoints": re.compile(rf"latest|best|{NAME.pattern}|{write.LEFT_FOLDER.pattern}|{write.LEFT_LINK.pattern}"),
    "tensorboard": re.compile(r"events\.out\.tfevents\..*|hparams\.yaml"),
    "csv": re.compile(r"from-\d{8,}"),
    "wandb": re.compile(r"(offline-)?run-\d{8}_\d{6}-.*|latest-run|debug(-internal)?\.log|settings"),
    "step": re.compile("|".join(map(re.escape, (*manifest.FILES, manifest.NAME)))),
}
"""The names that a run uses: in its folder, beside its checkpoints, in those of loggers, and in a checkpoint."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a run folder against every other training; it is made if need be, and removed if it stays empty."""
    new = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        with Lock(folder / LOCK):
            yield
    except Held as held:
        raise UsageError(
            f"{folder}: {held} is training into it. Wait for it, stop it, or choose another folder by --out."
        ) from None
    except OSError as error:
        if error.filename is None or Path(error.filename) not in (folder / LOCK, folder, *folder.parents):
            raise
        raise UsageError(f"{folder}: cannot be written to ({error.strerror}). Choose another --out.") from None
    finally:
        for place in new:
            if place.is_dir() and not any(place.iterdir()):
                place.rmdir()


def check_own(folder: Path) -> None:
    """Refuse to resume a run where it would overwrite files of the user."""
    for name in (ENVIRONMENT, RECIPE, TOKENIZER, METRICS):
        if (folder / name).exists() and not _is_run(folder):
            raise UsageError(f"{folder / name}: not of a run of lmlong, and training would replace it. Choose --out.")


def check_kept(training: Training, folder: Path) -> None:
    """Refuse to start from weights in the folder that is to be replaced, or to learn from them."""
    for key, source in (("init_from", training.init_from), ("teacher", training.teacher)):
        if source and find(source).is_relative_to(folder.resolve()):
            raise UsageError(f"training.{key}: {source} lies in {folder}, which --overwrite empties. Choose --out.")


def check_replaceable(folder: Path) -> None:
    """Refuse to replace a folder unless it holds a run, and nothing else."""
    there = [path for path in folder.iterdir() if path.name != LOCK]
    if there and not _is_run(folder):
        raise UsageError(f"{folder}: no run of lmlong, so --overwrite leaves it alone. Empty it, or choose --out.")
    if strange := next(_foreign_files(folder), None):
        raise UsageError(f"{strange}: not of a run, and --overwrite would delete it. Move it, or choose --out.")


def _is_run(folder: Path) -> bool:
    """Return whether training has begun here, which it records before anything else, or has left a checkpoint."""
    try:
        about = parse_json((folder / ENVIRONMENT).read_bytes())
    except (OSError, ValueError):
        about = None
    noted = isinstance(about, dict) and isinstance(about.get("packages"), dict) and "lmlong" in about["packages"]
    return noted or bool(CheckpointStore(folder / "checkpoints").all())


def _foreign_files(folder: Path) -> Iterator[Path]:
    """Iterate over the files in a run folder that no run wrote."""
    for path in sorted(folder.iterdir()):
        is_folder = path.name in ("checkpoints", *OF_LOGGERS) or BRANCH.fullmatch(path.name) is not None
        if not OWN[""].fullmatch(path.name) or path.is_symlink() or path.is_dir() != is_folder:
            yield path
        elif BRANCH.fullmatch(path.name):
            yield from _foreign_files(path)
        elif path.name == "checkpoints":
            yield from _foreign_checkpoints(path)
        elif path.name in OF_LOGGERS:
            yield from (inner for inner in sorted(path.iterdir()) if not OWN[path.name].fullmatch(inner.name))


def _foreign_checkpoints(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        names_a_link = path.name in ("latest", "best") or write.LEFT_LINK.fullmatch(path.name) is not None
        if (
            not OWN["checkpoints"].fullmatch(path.name)
            or is_link(path) != names_a_link
            or not (names_a_link or path.is_dir())
        ):
            yield path
        elif not names_a_link:
            yield from (inner for inner in sorted(path.iterdir()) if not OWN["step"].fullmatch(inner.name))


def clear(folder: Path) -> None:
    """Remove a run, the files that mark it as one last; its lock stays."""
    for path in sorted(folder.iterdir(), key=lambda path: path.name == ENVIRONMENT):
        if path.name == LOCK:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def note(folder: Path, setup: Setup) -> None:
    """Record the recipe, the tokenizer and the environment of a run."""
    environment = {
        "command": sys.argv,
        "begun": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
        "plugins": {name: LOADED[name].sha256 for name in setup.recipe.plugins},
        "machine": platform.platform(),
        "device": torch.cuda.get_device_name() if setup.device.type == "cuda" else platform.processor(),
        "threads": torch.get_num_threads(),
        "parameters": count_parameters(setup.model),
        "text": setup.tokens.info,
    }
    atomic_write(folder / ENVIRONMENT, json.dumps(environment, indent=2) + "\n")
    atomic_write(folder / RECIPE, recipe_file.dump(setup.recipe))
    setup.tokens.tokenizer.save(folder / TOKENIZER)


def go_on_from(folder: Path, checkpoint: Path, options: recipe.Training) -> Path:
    """Make a verified checkpoint the newest of a run, whose checkpoints are then one history; return its path there.

    Later checkpoints are moved aside, not removed. A checkpoint of another run is copied, with the metrics up to it.
    What a kill left undone after a save is done now.
    """
    checkpoints = CheckpointStore(folder / "checkpoints", options.keep_last, options.keep_every)
    checkpoints.folder.mkdir(parents=True, exist_ok=True)
    write.clean(checkpoints.folder)
    step, place = manifest.read(checkpoint).step, checkpoint
    if checkpoint.resolve() in [path.resolve() for path in checkpoints.all()]:
        _set_aside(checkpoints, step)
    else:
        # the metrics up to it; unknown where the checkpoint was taken out of its run
        known = checkpoint.parents[1] / METRICS if checkpoint.parent.name == "checkpoints" else None
        metrics = known.read_text(encoding="utf-8", errors="replace") if known and known.is_file() else ""
        _set_aside(checkpoints, -1)
        atomic_write(folder / METRICS, metrics)
        place = checkpoints.path(step)
        write.copy(checkpoint, place)
    checkpoints.link()
    checkpoints.prune()
    return place


def _set_aside(checkpoints: CheckpointStore, step: int) -> None:
    """Move the checkpoints after a step into a run folder of their own, the newest first: whenever the machine stops,
    those that stay are the first ones of the history."""
    later = [path for path in checkpoints.all() if int(path.name.removeprefix("step-")) > step]
    if not later:
        return
    run = checkpoints.folder.parent
    used = [int(name[1]) for path in run.iterdir() if (name := BRANCH.fullmatch(path.name))]
    branch = run / f"abandoned-{max(used, default=0) + 1}"
    aside = CheckpointStore(branch / "checkpoints")
    aside.folder.mkdir(parents=True)
    for file in (RECIPE, TOKENIZER, ENVIRONMENT, METRICS):
        if (run / file).is_file():
            shutil.copyfile(run / file, branch / file)
    for path in reversed(later):
        shutil.move(path, aside.folder / path.name)  # copies where `checkpoints` is on another disk
        aside.link()
    print(f"moved aside to {branch}: {', '.join(path.name for path in later)}", file=sys.stderr)
