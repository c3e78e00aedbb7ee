"""The training state of a run: the contents of a checkpoint beside the weights.

It holds only what cannot be derived: the step, the optimizer's moments, random states, and values carried from step to
step. Learning rate, weight decay and the position in the text follow from the recipe and the step, so a changed option
takes effect on resume.
"""

import math
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.amp import GradScaler

from lmlong import recipe
from lmlong.attention.base import state_tensors
from lmlong.attention.state_check import StateError
from lmlong.checkpoint import manifest
from lmlong.checkpoint.read import REAL, read_training, unload
from lmlong.errors import CheckpointError, UsageError
from lmlong.model.base import TextModel
from lmlong.model.ngram_embedding import tables_of
from lmlong.model.state import rebuild_state
from lmlong.training.distributed import all_gather, all_reduce_max, print_once
from lmlong.training.module import TrainingModule
from lmlong.training.optimizer import moments_of, parameter_groups

LARGEST_GPU_RANDOM_STATE = 1 << 12
"""Bytes. A CUDA generator's state takes 16; torch checks the exact size if there is a GPU."""

INTEGER_DTYPES = {torch.int64, torch.int32, torch.uint8, torch.bool}
"""Dtypes of positions, counts and masks, which a carried state may also have."""

ADDED = {"seconds": 0.0, "teacher": "", "row_squares": None}
"""Parts missing from older checkpoints, with the values to assume for them."""

LARGEST_COUNT = 1 << 40

NEVER_NEGATIVE = {"step", "exp_avg_sq"}


def training_state(module: TrainingModule) -> dict[str, Any]:
    """Return the training state after a step; all ranks call this, since each may hold a part of it."""
    trainer = module.trainer
    return {
        "step": module.step,
        "optimizer": trainer.strategy.optimizer_state(trainer.optimizers[0])["state"],
        "row_squares": module.row_optimizer and module.row_optimizer.squares,
        "scaler": trainer.precision_plugin.state_dict() or None,  # of float16
        "skipped": int(module.skipped),
        "carried": [of_batches(module, all_gather(trainer, tensor)) for tensor in state_tensors(module.carried)],
        "seconds": module.clock.seconds,
        "recent": list(module.recent),
        **module.prepared.source_hashes,
        "random": random_states(),
    }


def restore(module: TrainingModule, state: dict[str, Any]) -> None:
    """Restore a training state before the first step of a resumed run, whose weights are loaded already.

    The moments are moved out of `state`, since they may take much memory.
    """
    trainer = module.trainer
    _check_same_checkpoint(module)
    # checkpoints store only moments; a second optimizer provides the group options of the current recipe
    options = module.configure_optimizers().state_dict()["param_groups"]
    moments = {"state": state.pop("optimizer"), "param_groups": options}
    trainer.strategy.load_optimizer_state_dict({"optimizer_states": [moments]})
    if module.row_optimizer and state["row_squares"] is not None:
        module.row_optimizer.squares = state["row_squares"].to(module.device)
    if state["scaler"] is not None:
        trainer.precision_plugin.load_state_dict(state["scaler"])
    module.skipped.fill_(min(state["skipped"], module.skips_allowed))
    module.carried = _carried_state(module, [of_own_batch(module, tensor) for tensor in state["carried"]])
    module.recent.extend(state["recent"])
    restore_random_states(state["random"])


def of_batches(module: TrainingModule, tensor: Tensor) -> Tensor:
    """Return a tensor of each of the batches that are read at the same time, stacked if they are several, given those
    of all ranks: the ranks that read the parts of a batch have the same."""
    own = tensor[:: module.recipe.training.sequence_parallel] if module.trainer.world_size > 1 else tensor[None]
    return own if len(own) > 1 else own[0]


def of_own_batch(module: TrainingModule, tensor: Tensor) -> Tensor:
    """Return the tensor of this rank's batch."""
    group = module.trainer.global_rank // module.recipe.training.sequence_parallel
    return tensor if module.recipe.batches_at_once == 1 else tensor[group]


def _carried_state(module: TrainingModule, tensors: list[Tensor]) -> Any:
    """Return the model state after the previous batch from its tensors; None if none is carried."""
    if not tensors:
        return None
    empty = module.model.init_state(module.recipe.training.batch_size)
    try:
        if len(tensors) != len(list(state_tensors(empty))):
            raise StateError("another number of tensors")
        state = rebuild_state(empty, iter([tensor.to(module.device) for tensor in tensors]))
        module.model.check_state(state, empty)
    except StateError as error:
        raise CheckpointError(f"the carried states are not of this model ({error}). Use another one.") from None
    return state


def _check_same_checkpoint(module: TrainingModule) -> None:
    """Refuse to train if the ranks have read different checkpoints: only the main process verifies digests, and it may
    have skipped a damaged checkpoint."""
    number = int(module.prepared.weights_hash[:12], 16)
    largest, smallest = all_reduce_max(module.trainer, number), -all_reduce_max(module.trainer, -number)
    if largest != smallest:
        raise CheckpointError(
            "--resume: the processes have read different checkpoints: the newest is damaged, or the run folder is not "
            "the same on all machines. Start again: damaged checkpoints have been moved aside."
        )


def read_state(
    checkpoint: Path, model: TextModel, options: recipe.Training, source_hashes: Mapping[str, str]
) -> dict[str, Any]:
    """Return the training state of a checkpoint; refuse a state of another model, text or teacher.

    Every rank validates it, though only the main process has verified the digest.
    """
    mapped = options.strategy == "deepspeed"  # each rank takes its part
    state = read_training(checkpoint, verify=False, mapped=mapped)
    if isinstance(state, dict):
        state = {**ADDED, **state}
    moments = [
        {name: torch.Size() if name == "step" else weight.shape for name in moments_of(group)}
        for group in parameter_groups(model, options)
        for weight in group["params"]
    ]
    tables = tables_of(model)
    rows = None if tables is None else torch.Size([len(tables.table)])
    if wrong := _first_mistake(state, moments, mapped, rows):
        raise CheckpointError(f"{checkpoint}: the training state's {wrong} is not of this run. Use another checkpoint.")
    if state["step"] != manifest.read(checkpoint).step:
        raise CheckpointError(f"{checkpoint}: its manifest has another step. Use another checkpoint.")
    for name, source_hash in source_hashes.items():
        if state[name] != source_hash:
            raise UsageError(
                f"--resume: the {name} has changed since the run began. Put it back, or begin another run."
            )
    return state


Moments = list[dict[str, torch.Size]]
"""The names and shapes of the optimizer's moments of each weight, in the optimizer's order."""


def _first_mistake(state: Any, moments: Moments, mapped: bool, rows: torch.Size | None) -> str:
    """Return the name of the first invalid part of a training state, or an empty string. Moments that are `mapped`
    from a file take memory one at a time. `rows`: the shape of the squares of rows; None without tables."""
    if not isinstance(state, dict):
        return "form"
    if "optimizer" not in state or not _are_moments(state["optimizer"], moments, mapped):
        return "optimizer"
    if state["row_squares"] is not None and (rows is None or not _are_squares(state["row_squares"], rows)):
        return "row_squares"
    return next((name for name, is_valid in PARTS.items() if name not in state or not is_valid(state[name])), "")


def _are_moments(value: Any, moments: Moments, mapped: bool) -> bool:
    """Return whether these are the optimizer's moments of all weights, or empty as before the first step."""
    if not isinstance(value, dict) or (value and list(value) != list(range(len(moments)))):
        return False
    return all(_are_moments_of(value[number], shapes, mapped) for number, shapes in enumerate(moments if value else []))


def _are_moments_of(value: Any, shapes: dict[str, torch.Size], mapped: bool) -> bool:
    if not isinstance(value, dict) or value.keys() != shapes.keys():
        return False
    for name, tensor in value.items():
        if not _is_finite(tensor, shapes[name]) or (name in NEVER_NEGATIVE and not bool((tensor >= 0).all())):
            return False
        if mapped:
            unload(tensor)
    return True


def _are_squares(value: Any, shape: torch.Size) -> bool:
    return _is_finite(value, shape) and bool((value >= 0).all())


def _is_finite(value: Any, shape: torch.Size | None = None) -> bool:
    """Return whether this is a tensor of a shape, with finite numbers that float32 can hold."""
    if not isinstance(value, Tensor) or value.is_nested or value.layout != torch.strided or value.is_meta:
        return False
    size = value.numel() * value.element_size()  # checked before any computation on the tensor
    if value.untyped_storage().nbytes() < size or (shape is not None and value.shape != shape):
        return False
    if not value.is_floating_point():
        return shape is None and value.dtype in INTEGER_DTYPES
    return value.dtype in REAL and bool(value.float().isfinite().all())


def _is_scaler(value: Any) -> bool:
    return value is None or (
        isinstance(value, dict)
        and value.keys() == GradScaler("cpu").state_dict().keys()
        and all(type(number) in (int, float) and math.isfinite(number) for number in value.values())
    )


def _are_random_states(value: Any) -> bool:
    """Return whether these are valid random states, with those of any number of GPUs."""
    own = random_states()
    if not isinstance(value, dict) or value.keys() != own.keys():
        return False
    if not isinstance(value["cuda"], list) or not all(map(_is_gpu_random_state, value["cuda"])):
        return False
    return all(_has_form_of(own[name], value[name]) for name in own if name != "cuda")


def _is_gpu_random_state(value: Any) -> bool:
    """Return whether this has the form of a CUDA generator's state; works without a GPU."""
    is_flat = _is_finite(value) and value.dtype == torch.uint8 and value.dim() == 1
    return is_flat and 0 < len(value) <= LARGEST_GPU_RANDOM_STATE


def _has_form_of(own: Any, value: Any) -> bool:
    """Return whether a value has the structure and types of this process's own."""
    if isinstance(own, list):
        return isinstance(value, list) and len(value) == len(own) and all(map(_has_form_of, own, value))
    if isinstance(own, Tensor):
        return isinstance(value, Tensor) and value.dtype == own.dtype and value.shape == own.shape
    return type(value) is type(own)


PARTS: dict[str, Callable[[Any], bool]] = {
    "step": lambda value: type(value) is int and 0 < value < LARGEST_COUNT,
    "scaler": _is_scaler,
    "skipped": lambda value: type(value) is int and 0 <= value < LARGEST_COUNT,
    "carried": lambda value: isinstance(value, list) and all(map(_is_finite, value)),  # shapes: `_carried_state`
    "seconds": lambda value: type(value) is float and 0 <= value < math.inf,
    "recent": lambda value: (
        isinstance(value, list) and all(type(loss) is float and math.isfinite(loss) for loss in value)
    ),
    "text": lambda value: isinstance(value, str),
    "teacher": lambda value: isinstance(value, str),
    "random": _are_random_states,
}
"""The parts of a training state other than the optimizer's, with their validity checks."""


def random_states() -> dict[str, Any]:
    """Return the random states of Python, numpy, torch and each GPU."""
    kind, words, position, has_gauss, gauss = np.random.get_state()
    return {
        "python": list(random.getstate()[1]),
        "numpy": [kind, np.asarray(words).tolist(), position, has_gauss, gauss],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all(),
    }


def restore_random_states(states: dict[str, Any], gpus: int | None = None) -> None:
    """Restore random states, for up to `gpus` GPUs, by default all visible ones."""
    gpus = torch.cuda.device_count() if gpus is None else gpus
    saved = states["cuda"]
    try:
        if not 0 <= states["numpy"][2] <= 624:  # otherwise numpy reads out of bounds
            raise ValueError("numpy's position is out of range")
        random.setstate((random.getstate()[0], tuple(states["python"]), None))
        np.random.set_state(tuple(states["numpy"]))
        torch.set_rng_state(states["torch"])
        for number, state in enumerate(saved[:gpus]):
            torch.cuda.set_rng_state(state, number)
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise CheckpointError(f"the checkpoint's random states are not valid ({error}). Use another one.") from error
    if len(saved) != gpus:
        print_once(
            f"random states: the checkpoint has those of {len(saved)} GPUs and {gpus} are visible, "
            f"{min(len(saved), gpus)} restored"
        )
