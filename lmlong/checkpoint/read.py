"""Reading a checkpoint: found by run, by name or by path; every file verified before it is opened."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from lmlong import recipe_file
from lmlong.checkpoint import manifest
from lmlong.checkpoint.write import RECIPE, TOKENIZER, TRAINING, WEIGHTS
from lmlong.errors import CheckpointError, RecipeError, nearest
from lmlong.recipe import Recipe

LATEST, BEST = "latest", "best"


def find(run: str | Path) -> Path:
    """The checkpoint meant by a run folder, the name of a run under runs/, or the checkpoint's own folder."""
    path = Path(run)
    if not path.exists() and (Path("runs") / run).exists():
        path = Path("runs") / run
    if not path.exists():
        runs = [folder.name for folder in Path("runs").glob("*/")]
        raise CheckpointError(f"{run}: no such run or checkpoint.{nearest(str(run).removeprefix('runs/'), runs)}")
    for candidate in (path, path / "checkpoints" / LATEST):
        if (candidate / manifest.NAME).is_file():
            return candidate.resolve()
    raise CheckpointError(f"{path}: holds no checkpoint. Train it first, or name another run.")


def read_recipe(checkpoint: Path) -> Recipe:
    """The recipe the weights were trained by."""
    manifest.verify(checkpoint, RECIPE)
    try:
        return recipe_file.load(str(checkpoint / RECIPE))
    except RecipeError as error:
        raise CheckpointError(f"{checkpoint / RECIPE}: not of this version of lmlong.\n{error}") from error


def tokenizer_path(checkpoint: Path) -> Path:
    """The tokenizer the weights were trained with, verified."""
    manifest.verify(checkpoint, TOKENIZER)
    return checkpoint / TOKENIZER


def read_weights(checkpoint: Path) -> dict[str, Tensor]:
    """The weights, verified, on the CPU."""
    manifest.verify(checkpoint, WEIGHTS)
    try:
        return load_file(checkpoint / WEIGHTS)
    except SafetensorError as error:
        raise CheckpointError(f"{checkpoint / WEIGHTS}: {error}. Use another checkpoint.") from error


def read_training(checkpoint: Path) -> dict[str, Any]:
    """The state of training, verified; only tensors and plain values are ever built from it."""
    manifest.verify(checkpoint, TRAINING)
    try:
        return torch.load(checkpoint / TRAINING, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds here, and each means the same
        raise CheckpointError(f"{checkpoint / TRAINING}: cannot be read safely. Use another checkpoint.") from error


def load_weights(model: nn.Module, checkpoint: Path, new_attention: bool = False) -> None:
    """Put the weights of a checkpoint into a model of the same shape.

    With `new_attention`, what belongs to one kind of attention alone may be missing, and stays as the model has it, or
    be too much, and is left out: queries, keys and values mean the same to all of them.
    """
    weights, wanted = read_weights(checkpoint), model.state_dict()
    if new_attention:
        weights = {name: tensor for name, tensor in weights.items() if name in wanted or not _of_attention(name)}
        weights |= {name: wanted[name] for name in wanted.keys() - weights.keys() if _of_attention(name)}
    for name in [*wanted, *(weights.keys() - wanted.keys())]:
        here, there = (tuple(side[name].shape) if name in side else "none" for side in (wanted, weights))
        if here != there:
            raise CheckpointError(
                f"{checkpoint / WEIGHTS}: {name} is {there}, the recipe's model has {here}. "
                "Use the recipe this checkpoint was trained by."
            )
    model.load_state_dict(weights)


def _of_attention(name: str) -> bool:
    """Whether a weight is the attention's own: its features, its forget gate."""
    return ".mixer.attention." in name or ".mixer.forget." in name
