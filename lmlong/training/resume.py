"""Going on with a run: from which checkpoint, and whether the recipe still means the same run."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lmlong.checkpoint import manifest, read
from lmlong.errors import CheckpointError, UsageError
from lmlong.recipe import Recipe

FIXED = (
    "seed",
    "text.",
    "model.",
    "training.devices",
    "training.batch_size",
    "training.accumulate",
    "training.carry_state",
)
"""What weights, data order and draws hang on; all else may change on the way."""

LEFT_TO_THE_MACHINE = ("device", "training.precision")
"""`auto` here is no change: a run knows what it became."""


def resume_point(folder: Path, resume: str) -> Path | None:
    """The checkpoint --resume means: `auto` is the newest of the run that verifies, or none before the first."""
    if resume != "auto":
        return read.find(resume)
    checkpoints = sorted((folder / "checkpoints").glob("step-*"), reverse=True)
    for path in checkpoints:
        try:
            manifest.verify(path)
            return path
        except CheckpointError as error:
            print(f"passed over: {error}", file=sys.stderr)
    if checkpoints:
        raise CheckpointError(f"{folder}: none of its checkpoints verifies. Start anew with --overwrite.")
    return None


def check_same_run(old: Recipe, new: Recipe) -> None:
    """Tell what has changed since the checkpoint; refuse what would make it another run."""
    for key, before, now in changes(old.model_dump(), new.model_dump()):
        if key in LEFT_TO_THE_MACHINE and now == "auto":
            continue
        if key.startswith(FIXED):
            raise UsageError(
                f"--resume: {key} was {before} in this run and is {now} now. Put it back, or begin another run by "
                "--out; training.init_from takes the weights along."
            )
        print(f"changed since the checkpoint: {key} from {before} to {now}", file=sys.stderr)


def changes(old: dict[str, Any], new: dict[str, Any], section: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Each dotted key whose value differs, with both values."""
    for key in new:
        before, now = old.get(key), new[key]
        if isinstance(before, dict) and isinstance(now, dict):
            yield from changes(before, now, f"{section}{key}.")
        elif before != now:
            yield f"{section}{key}", before, now
