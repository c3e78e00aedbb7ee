"""The manifest of a checkpoint: its step, its validation metric, and each file's size and sha256."""

from collections.abc import Iterable
from math import isfinite
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

from lmlong.errors import CheckpointError
from lmlong.io import folder_manifest
from lmlong.io.folder_manifest import DamagedFolder, Format
from lmlong.recipe import find

NAME = folder_manifest.NAME
FORMAT = Format("checkpoint", 3, "Train again")
WEIGHTS, RECIPE, TOKENIZER = "model.safetensors", find.RECIPE, "tokenizer.model"
TRAINING_TENSORS, TRAINING_VALUES = "training.safetensors", "training.json"
START = (WEIGHTS, RECIPE, TOKENIZER)
FILES = (*START, TRAINING_TENSORS, TRAINING_VALUES)

EARLIER_TRAINING = "training.pt"
"""The training state of earlier versions, which is never read."""


class Manifest(NamedTuple):
    """The manifest of a checkpoint."""

    files: dict[str, dict[str, Any]]
    step: int  # optimizer steps taken
    validation: float | None  # validation metric, lower is better
    trained_tokens: int | None = None  # including the runs it began from; None in older checkpoints


def verify(folder: Path, names: Iterable[str] = FILES, digests: bool = True) -> None:
    """Refuse a checkpoint unless these files are as they were saved; without `digests`, only their sizes are
    checked."""
    check = folder_manifest.has_digest if digests else lambda path, digest: True
    try:
        folder_manifest.verify(folder, FORMAT, names, check)
    except DamagedFolder as error:
        raise CheckpointError(f"{error} Use another checkpoint.") from None


def read(folder: Path) -> "Manifest":
    """Return the manifest of a checkpoint."""
    try:
        files, about = folder_manifest.read_manifest(folder, FORMAT)
    except DamagedFolder as error:
        raise CheckpointError(f"{error} Use another checkpoint.") from None
    step, validation = about.get("step"), about.get("validation")
    tokens = about.get("trained_tokens")
    if (
        type(step) is not int
        or type(tokens) not in (int, NoneType)
        or not (validation is None or (type(validation) is float and isfinite(validation)))
    ):
        raise CheckpointError(f"{folder / NAME}: damaged. Use another checkpoint.")
    return Manifest(files, step, validation, tokens)
