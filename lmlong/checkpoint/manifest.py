"""The manifest of a checkpoint: its step, what it was found to be worth, and each file's size and sha256."""

from collections.abc import Iterable
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from lmlong.errors import CheckpointError
from lmlong.io import manifest
from lmlong.io.manifest import Damaged, Format

NAME = manifest.NAME
FORMAT = Format("checkpoint", 2)
WEIGHTS, TRAINING, RECIPE, TOKENIZER = "model.safetensors", "training.pt", "recipe.yaml", "tokenizer.model"
FILES = (WEIGHTS, TRAINING, RECIPE, TOKENIZER)


class Manifest(NamedTuple):
    """What a checkpoint says of itself."""

    files: dict[str, dict[str, Any]]
    step: int  # the optimizer steps behind it
    validation: float | None  # what it was found to be worth, less being better


def verify(folder: Path, names: Iterable[str] = FILES) -> None:
    """Refuse a checkpoint unless these of its files are what was saved."""
    try:
        manifest.verify(folder, FORMAT, names)
    except Damaged as error:
        raise CheckpointError(f"{error} Use another checkpoint.") from None


def read(folder: Path) -> "Manifest":
    """What a checkpoint says of itself."""
    try:
        files, about = manifest.read(folder, FORMAT)
    except Damaged as error:
        raise CheckpointError(f"{error} Use another checkpoint.") from None
    step, validation = about.get("step"), about.get("validation")
    if type(step) is not int or not (validation is None or (type(validation) is float and isfinite(validation))):
        raise CheckpointError(f"{folder / NAME}: damaged. Use another checkpoint.")
    return Manifest(files, step, validation)
