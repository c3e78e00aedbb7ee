"""The training state: in our checkpoints, and in Lightning's.

A checkpoint holds only what cannot be computed: the step, the optimizer's moments, random states, and what is carried
from step to step. Learning rate, weight decay and all counts of Lightning's loops follow from the recipe and the step,
so that an option changed during a run takes effect.
"""

import math
import random
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import lightning
import numpy as np
import torch
from torch import Tensor
from torch.amp import GradScaler

from lmlong import recipe
from lmlong.checkpoint import manifest
from lmlong.checkpoint.read import REAL, read_training
from lmlong.errors import CheckpointError, UsageError
from lmlong.model.base import TextModel
from lmlong.training.distributed import tell
from lmlong.training.optimizer import moments_of, parameter_groups

Moments = list[dict[str, torch.Size]]
"""The names and shapes of what the optimizer keeps for each weight, in the order in which it numbers them."""

LARGEST_GPU_RANDOM_STATE = 1 << 12
"""Bytes; torch, whose CUDA generators take 16, checks the exact size where there is a GPU."""

SCALER = "MixedPrecision"
"""Lightning's name for the state of the gradient scaler of float16."""

INTEGER_DTYPES = {torch.int64, torch.int32, torch.uint8, torch.bool}
"""Dtypes of positions, counts and masks, which a carried state may also have."""

ADDED = {"seconds": 0.0, "teacher": ""}
"""Parts that checkpoints of before do not have, with what they stood for."""

NEVER_NEGATIVE = {"step", "exp_avg_sq"}

CALLBACK_KEYS = ("recent", "text", "teacher", "random")
"""Keys of the state of `TrainingCallback`."""


class Owners(NamedTuple):
    """What a run learns from, by hashes, for it is the same run only as long as they are."""

    text: str
    teacher: str  # empty where there is none


def read_state(checkpoint: Path, model: TextModel, options: recipe.Training, owners: Owners) -> dict[str, Any]:
    """Return the training state of a checkpoint; refuse one that is not of this model, this text and this teacher."""
    state = read_training(checkpoint)
    if isinstance(state, dict):
        state = {**ADDED, **state}
    if wrong := _first_mistake(state, _moments(model, options)):
        raise CheckpointError(f"{checkpoint}: the training state's {wrong} is not of this run. Use another checkpoint.")
    if state["step"] != manifest.read(checkpoint).step:
        raise CheckpointError(f"{checkpoint}: its manifest tells of another step. Use another checkpoint.")
    for what, its_hash in owners._asdict().items():
        if state[what] != its_hash:
            raise UsageError(
                f"--resume: the {what} has changed since the run began. Put it back, or begin another run."
            )
    return state


def from_lightning(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return the training state in Lightning's checkpoint."""
    (optimizer,) = checkpoint["optimizer_states"]
    kept = {name: checkpoint["callbacks"]["TrainingCallback"][name] for name in CALLBACK_KEYS}
    return {
        "step": checkpoint["global_step"],
        "optimizer": optimizer["state"],
        "scaler": checkpoint.get(SCALER),
        "skipped": checkpoint["skipped"],
        "carried": checkpoint["carried"],
        "seconds": checkpoint["seconds"],
        **kept,
    }


def to_lightning(state: dict[str, Any]) -> dict[str, Any]:
    """Return Lightning's checkpoint without weights; the `TrainingModule` sets loops and optimizer options."""
    scaler = {SCALER: state["scaler"]} if state["scaler"] is not None else {}
    return {
        "pytorch-lightning_version": lightning.__version__,
        "epoch": 0,
        "global_step": state["step"],
        "optimizer_states": [{"state": state["optimizer"]}],
        "lr_schedulers": [],
        "callbacks": {"TrainingCallback": {name: state[name] for name in CALLBACK_KEYS}},
        "skipped": state["skipped"],
        "carried": state["carried"],
        "seconds": state["seconds"],
        **scaler,
    }


def loops_at(fresh: dict[str, Any], step: int, accumulate: int) -> dict[str, Any]:
    """Return the state of Lightning's loops after `step` optimizer steps, from that before the first: as it is when a
    step's last batch ends, which is not counted as completed yet."""
    batches = step * accumulate
    loops = deepcopy(fresh)
    loops["epoch_loop.state_dict"]["_batches_that_stepped"] = step - 1
    optimizer = loops["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
    for progress, count in (
        (loops["epoch_loop.batch_progress"], batches),
        (optimizer["step"], step),
        (optimizer["zero_grad"], step),
    ):
        for counts in (progress["total"], progress["current"]):
            counts.update(dict.fromkeys(counts, count))
    for counts in (loops["epoch_loop.batch_progress"][which] for which in ("total", "current")):
        counts["completed"] = batches - 1
    for counts in (loops["epoch_progress"][which] for which in ("total", "current")):
        counts.update(ready=1, started=1)
    return loops


def _moments(model: TextModel, options: recipe.Training) -> Moments:
    """Return what the optimizer of a recipe keeps."""
    return [
        {name: torch.Size() if name == "step" else weight.shape for name in moments_of(group)}
        for group in parameter_groups(model, options)
        for weight in group["params"]
    ]


def _first_mistake(state: Any, moments: Moments) -> str:
    """Return the name of the first part that is invalid for such a model, or an empty string."""
    if not isinstance(state, dict):
        return "form"
    return next(
        (name for name, is_sound in PARTS.items() if name not in state or not is_sound(state[name], moments)), ""
    )


def _is_count(value: Any, *_: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 40


def _are_moments(found: Any, wanted: Moments) -> bool:
    """Return whether these are the optimizer's moments of all weights, or none as before the first step."""
    if not isinstance(found, dict) or (found and list(found) != list(range(len(wanted)))):
        return False
    return all(_are_moments_of(found[number], moments) for number, moments in enumerate(wanted if found else []))


def _are_moments_of(found: Any, wanted: dict[str, torch.Size]) -> bool:
    if not isinstance(found, dict) or found.keys() != wanted.keys():
        return False
    sound = all(_is_finite(tensor, wanted[name]) for name, tensor in found.items())
    return sound and all(bool((found[name] >= 0).all()) for name in NEVER_NEGATIVE & found.keys())


def _is_finite(value: Any, shape: torch.Size | None = None) -> bool:
    """Return whether this is a tensor of finite numbers, which float32 can hold, of a shape."""
    if not isinstance(value, Tensor) or value.is_nested or value.layout != torch.strided or value.is_meta:
        return False
    size = value.numel() * value.element_size()
    if value.untyped_storage().nbytes() < size or (
        shape is not None and value.shape != shape
    ):  # before any computation on it
        return False
    if not value.is_floating_point():
        return shape is None and value.dtype in INTEGER_DTYPES
    return value.dtype in REAL and bool(value.float().isfinite().all())


def _is_scaler(value: Any, *_: Any) -> bool:
    return value is None or (
        isinstance(value, dict)
        and value.keys() == GradScaler("cpu").state_dict().keys()
        and all(type(number) in (int, float) and math.isfinite(number) for number in value.values())
    )


def _are_carried(value: Any, *_: Any) -> bool:
    """Return whether these are tensors; the `TrainingModule`, which knows the batch size, checks whether they fit."""
    return isinstance(value, list) and all(map(_is_finite, value))


def _are_losses(value: Any, *_: Any) -> bool:
    return isinstance(value, list) and all(type(loss) is float and math.isfinite(loss) for loss in value)


def _are_random_states(value: Any, *_: Any) -> bool:
    """Return whether these are random states, those of any number of GPUs among them."""
    known = random_states()
    if not isinstance(value, dict) or value.keys() != known.keys():
        return False
    if not isinstance(value["cuda"], list) or not all(map(_is_gpu_random_state, value["cuda"])):
        return False
    return all(_like(value[name], known[name]) for name in known if name != "cuda")


def _is_gpu_random_state(value: Any) -> bool:
    """Return whether this has the form of a CUDA generator's state, which is checked without a GPU too."""
    is_flat = _is_finite(value) and value.dtype == torch.uint8 and value.dim() == 1
    return is_flat and 0 < len(value) <= LARGEST_GPU_RANDOM_STATE


def _like(value: Any, known: Any) -> bool:
    """Return whether a value has the structure and types of a known one; an empty list there allows any list."""
    if isinstance(known, dict):
        same = isinstance(value, dict) and value.keys() == known.keys()
        return same and all(_like(value[key], part) for key, part in known.items())
    if isinstance(known, list):
        return isinstance(value, list) and (not known or (len(value) == len(known) and all(map(_like, value, known))))
    if isinstance(known, Tensor):
        return isinstance(value, Tensor) and value.dtype == known.dtype and value.shape == known.shape
    return type(value) is type(known)


PARTS: dict[str, Callable[[Any, Moments], bool]] = {
    "step": lambda value, _: _is_count(value) and value > 0,
    "optimizer": _are_moments,
    "scaler": _is_scaler,
    "skipped": _is_count,
    "carried": _are_carried,
    "seconds": lambda value, _: type(value) is float and 0 <= value < math.inf,
    "recent": _are_losses,
    "text": lambda value, _: isinstance(value, str),
    "teacher": lambda value, _: isinstance(value, str),
    "random": _are_random_states,
}
"""The parts of a training state, with their validity checks."""


def random_states() -> dict[str, Any]:
    """Return the random states of Python, numpy, torch and each GPU."""
    kind, words, place, has_gauss, gauss = np.random.get_state()
    return {
        "python": list(random.getstate()[1]),
        "numpy": [kind, np.asarray(words).tolist(), place, has_gauss, gauss],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all(),
    }


def restore(states: dict[str, Any], gpus: int | None = None) -> None:
    """Restore random states; those of GPUs for up to `gpus` of them, by default all that are visible."""
    gpus = torch.cuda.device_count() if gpus is None else gpus
    saved = states["cuda"]
    try:
        if not 0 <= states["numpy"][2] <= 624:  # else numpy reads out of bounds
            raise ValueError("numpy's position is out of range")
        random.setstate((random.getstate()[0], tuple(states["python"]), None))
        np.random.set_state(tuple(states["numpy"]))
        torch.set_rng_state(states["torch"])
        for number, state in enumerate(saved[:gpus]):
            torch.cuda.set_rng_state(state, number)
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise CheckpointError(f"the checkpoint's random states are not valid ({error}). Use another one.") from error
    if len(saved) != gpus:
        tell(
            f"random states: the checkpoint has those of {len(saved)} GPUs and {gpus} are visible, "
            f"{min(len(saved), gpus)} restored"
        )
