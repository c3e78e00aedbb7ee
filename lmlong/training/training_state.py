"""The training state of a run: the contents of a checkpoint beside the weights.

It is a dict of tensors and plain values, by names such as `optimizer.0.exp_avg`, `carried.3` and `step`. It holds only
what cannot be derived: the step, the optimizer's moments, and values carried from step to step. Learning rate, weight
decay, the position in the text and random draws follow from the recipe and the step, so a changed option takes effect
on resume.
"""

import math
from collections.abc import Callable, Container, Mapping
from functools import partial
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler

from lmlong import recipe
from lmlong.attention.base import state_tensors
from lmlong.attention.state_check import REAL, StateError
from lmlong.checkpoint import manifest
from lmlong.checkpoint.read import read_training, unload
from lmlong.errors import CheckpointError, UsageError
from lmlong.model.base import TextModel
from lmlong.model.ngram_embedding import tables_of
from lmlong.model.state import rebuild_state
from lmlong.training.distributed import all_gather, all_reduce_max
from lmlong.training.module import TrainingModule
from lmlong.training.optimizer import moments_of, parameter_groups

INTEGER_DTYPES = {torch.int64, torch.int32, torch.uint8, torch.bool}
"""Dtypes of positions, counts and masks, which a carried state may also have."""

LARGEST_COUNT = 1 << 40

NEVER_NEGATIVE = ("row_squares", ".step", ".exp_avg_sq")
"""The ends of the names of tensors that have no negative numbers."""


def training_state(module: TrainingModule) -> dict[str, Any]:
    """Return the training state after a step; all ranks call this, since each may hold a part of it."""
    trainer = module.trainer
    moments: Any = trainer.strategy.optimizer_state(trainer.optimizers[0])["state"]
    carried = [of_batches(module, all_gather(trainer, tensor)) for tensor in state_tensors(module.carried)]
    return {
        "step": module.step,
        **{_moment(n, name): tensor for n, of_weight in moments.items() for name, tensor in of_weight.items()},
        "row_squares": module.row_optimizer and module.row_optimizer.squares,
        "scaler": trainer.precision_plugin.state_dict() or None,  # of float16
        "skipped": int(module.skipped),
        **{f"carried.{number}": tensor for number, tensor in enumerate(carried)},
        "seconds": module.clock.seconds,
        "recent": list(module.recent),
        **module.prepared.source_hashes,
    }


def _moment(number: int, name: str) -> str:
    return f"optimizer.{number}.{name}"


def _carried_names(state: Mapping[str, Any]) -> list[str]:
    """Return the names carried.0, carried.1 and so on, up to the last that is present."""
    return list(takewhile(state.__contains__, (f"carried.{number}" for number in count())))


def restore(module: TrainingModule, state: dict[str, Any]) -> None:
    """Restore a training state before the first step of a resumed run, whose weights are loaded already.

    The moments are moved out of `state`, since they may take much memory.
    """
    trainer = module.trainer
    _check_same_checkpoint(module)
    # checkpoints store only moments; a second optimizer provides the group options of the current recipe
    options = module.configure_optimizers().state_dict()["param_groups"]
    moments: dict[int, dict[str, Tensor]] = {}
    for name in [name for name in state if name.startswith("optimizer.")]:
        _, number, kind = name.split(".")
        moments.setdefault(int(number), {})[kind] = state.pop(name)
    optimizer = {"state": moments, "param_groups": options}
    trainer.strategy.load_optimizer_state_dict({"optimizer_states": [optimizer]})
    if module.row_optimizer and state["row_squares"] is not None:
        module.row_optimizer.squares = state["row_squares"].to(module.device)
    if state["scaler"] is not None:
        trainer.precision_plugin.load_state_dict(state["scaler"])
    module.skipped.fill_(min(state["skipped"], module.skips_allowed))
    carried = [of_own_batch(module, state[name]) for name in _carried_names(state)]
    module.carried = _carried_state(module, carried)
    module.recent.extend(state["recent"])


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
    groups = parameter_groups(model, options)
    weights = [(weight, moments_of(group)) for group in groups for weight in group["params"]]
    moments = {
        _moment(number, name): torch.Size() if name == "step" else weight.shape
        for number, (weight, names) in enumerate(weights)
        for name in names
    }
    # each rank of DeepSpeed takes its part
    mapped = moments if options.strategy == "deepspeed" else {}
    saved = read_training(checkpoint, mapped)
    # earlier versions saved random states, which each batch now sets
    state = {name: value for name, value in saved.items() if not name.startswith("random.")}
    tables = tables_of(model)
    rows = None if tables is None else torch.Size([len(tables.table)])
    if wrong := _first_mistake(state, moments, rows, mapped):
        raise CheckpointError(f"{checkpoint}: the training state's {wrong} is not of this run. Use another checkpoint.")
    if state["step"] != manifest.read(checkpoint).step:
        raise CheckpointError(f"{checkpoint}: its manifest has another step. Use another checkpoint.")
    for name, source_hash in source_hashes.items():
        if state[name] != source_hash:
            raise UsageError(
                f"--resume: the {name} has changed since the run began. Put it back, or begin another run."
            )
    return state


def _first_mistake(
    state: dict[str, Any], moments: dict[str, torch.Size], rows: torch.Size | None, mapped: Container[str]
) -> str:
    """Return the name of the first invalid part of a training state, or an empty string.

    `moments`: the shapes of the optimizer's moments, which has all or none of them, as before the first step. `rows`:
    the shape of the squares of rows; None without tables. Tensors that are `mapped` take memory one at a time.
    """
    shapes = dict(moments) if state.keys() & moments.keys() else {}
    if rows is not None and state.get("row_squares") is not None:
        shapes["row_squares"] = rows
    checks: dict[str, Callable[[Any], bool]] = {
        **VALUES,
        **{name: partial(_is_finite, shape=shape, name=name) for name, shape in shapes.items()},
        **dict.fromkeys(_carried_names(state), _is_finite),  # shapes: `_carried_state`
    }
    if differing := state.keys() ^ checks.keys():
        return repr(min(differing)[:50])
    for name, is_valid in checks.items():
        if not is_valid(state[name]):
            return name
        if name in mapped:
            unload(state[name])
    return ""


def _is_finite(value: Any, shape: torch.Size | None = None, name: str = "") -> bool:
    """Return whether this is a tensor of a shape, with finite numbers that float32 can hold, and none below 0 if those
    of its name never are."""
    if not isinstance(value, Tensor) or (shape is not None and value.shape != shape):
        return False
    if not value.is_floating_point():
        return shape is None and value.dtype in INTEGER_DTYPES
    if value.dtype not in REAL or not value.float().isfinite().all():
        return False
    return not name.endswith(NEVER_NEGATIVE) or bool((value >= 0).all())


def _is_scaler(value: Any) -> bool:
    return value is None or (
        isinstance(value, dict)
        and value.keys() == GradScaler("cpu").state_dict().keys()
        and all(type(number) in (int, float) and abs(number) < 2.0**128 for number in value.values())  # as float32
    )


VALUES: dict[str, Callable[[Any], bool]] = {
    "step": lambda value: type(value) is int and 0 < value < LARGEST_COUNT,
    "row_squares": lambda value: value is None,
    "scaler": _is_scaler,
    "skipped": lambda value: type(value) is int and 0 <= value < LARGEST_COUNT,
    "seconds": lambda value: type(value) is float and 0 <= value < LARGEST_COUNT,
    "recent": lambda value: (
        isinstance(value, list) and all(type(loss) is float and math.isfinite(loss) for loss in value)
    ),
    "text": lambda value: isinstance(value, str),
    "teacher": lambda value: isinstance(value, str),
}
"""The plain values of a training state, with their validity checks. `row_squares` is a tensor once tables learned."""
