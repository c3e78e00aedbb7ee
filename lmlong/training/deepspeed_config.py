"""DeepSpeed settings for a recipe."""

import sys
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lmlong import recipe
from lmlong.errors import UsageError
from lmlong.io.checked import shown
from lmlong.io.files import parse_json

SHOWN = 200
"""Maximum characters shown of DeepSpeed's own message."""

LARGEST_BUCKET = 500_000_000
"""Maximum number of gradients summed over the ranks at a time, DeepSpeed's default."""

SPAN = 10_000_000
"""Numbers that a rank holds at a time beyond its own part in stage 3, or more if the model has larger matrices."""

FROM_THE_RECIPE = {
    "train_batch_size": "training.batch_size",
    "train_micro_batch_size_per_gpu": "training.batch_size",
    "gradient_accumulation_steps": "training.accumulate",
    "gradient_clipping": "training.clip",
    "optimizer": "training.learning_rate and its neighbours",
    "scheduler": "training.schedule",
    "fp16": "training.precision",
    "bf16": "training.precision",
    "torch_autocast": "training.precision",
    "zero_optimization.stage": "training.deepspeed.stage",
}
"""DeepSpeed settings that a recipe determines, and the options that determine them."""

MIXED_UP = "and checkpoints would mix up the weights"

REFUSED = {
    "round_robin_gradients": f"puts the weights in another order before it divides them, {MIXED_UP}",
    "parameter_alignment": f"pads the weights before it divides them, {MIXED_UP}",
    "zenflow": f"keeps the moments of a part of the gradients in an optimizer of its own, {MIXED_UP}",
    "zero_hpz_partition_size": "needs the whole model at once to divide it, which is divided module by module",
}
"""Settings of `zero_optimization` that do not go together with how weights are divided, read and written here."""


def check_deepspeed(options: recipe.Training) -> None:
    """Refuse `strategy: deepspeed` if the package or the settings file is missing."""
    if options.strategy != "deepspeed":
        return
    if find_spec("deepspeed") is None:
        remedy = "Run pip install deepspeed, or use" if sys.platform == "linux" else "It is for Linux. Use"
        raise UsageError(f"training.strategy: deepspeed is not installed. {remedy} ddp or auto.")
    if options.deepspeed.config:
        _read(Path(options.deepspeed.config))


def settings(options: recipe.Training, device: torch.device) -> dict[str, Any]:
    """Return the DeepSpeed settings for a recipe, overridden by its own settings file."""
    on_gpu = device.type == "cuda"
    memory = {"device": "cpu", "pin_memory": on_gpu}
    deepspeed = options.deepspeed
    zero: dict[str, Any] = {"stage": deepspeed.stage, "overlap_comm": on_gpu, "contiguous_gradients": True}
    if deepspeed.offload_optimizer:
        zero["offload_optimizer"] = memory
    if deepspeed.offload_parameters:
        zero["offload_param"] = memory
    own = {
        "train_micro_batch_size_per_gpu": options.batch_size,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # ours needs no compiler
    }
    if not deepspeed.config:
        return {**own, "zero_optimization": zero}
    further = _read(Path(deepspeed.config))
    further["zero_optimization"] = {**zero, **further.get("zero_optimization", {})}
    _check({**own, "zero_optimization": zero}, further, deepspeed.config)
    return {**own, **further}


def set_sizes(zero: dict[str, Any], model: nn.Module) -> None:
    """Add sizes of buffers to the ZeRO settings, by the size of a model. DeepSpeed's defaults are half a billion or a
    billion numbers, whatever the size."""
    room = sum(weight.numel() for weight in model.parameters())
    defaults = {"reduce_bucket_size": min(LARGEST_BUCKET, room)}
    if zero["stage"] == 3:
        # the gradients summed, the whole weights in use, and the weights updated at a time; two matrices can take turns
        matrices = [module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear)]
        span = min(max(SPAN, 2 * max(matrices, default=0)), room)
        keys = "reduce_bucket_size", "stage3_max_live_parameters", "stage3_max_reuse_distance", "sub_group_size"
        defaults = dict.fromkeys(keys, span)
    zero.update(defaults | zero)


def _check(own: dict[str, Any], further: dict[str, Any], file: str) -> None:
    """Refuse settings that DeepSpeed cannot read, by name: DeepSpeed itself reports most of them by unrelated
    errors."""
    from deepspeed.runtime.config import DeepSpeedConfig

    for key, value in further.items():
        try:
            DeepSpeedConfig(deepcopy({**own, key: value}))
        except Exception as error:
            raise UsageError(
                f"training.deepspeed.config: {file}: {key} is {shown(value)}, which DeepSpeed cannot read "
                f"({' '.join(str(error).split())[:SHOWN]}). Correct the file."
            ) from error


def _read(path: Path) -> dict[str, Any]:
    """Return the settings in a file; none may contradict the recipe."""
    try:
        settings = parse_json(path.read_bytes())
        zero = settings.get("zero_optimization", {})
        if not isinstance(zero, dict):
            raise UsageError(
                f"training.deepspeed.config: {path}: zero_optimization is {shown(zero)}, not an object. Correct it."
            )
        named = {*settings, *(f"zero_optimization.{key}" for key in zero)}
    except OSError as error:
        raise UsageError(f"training.deepspeed.config: {path}: {error.strerror}. Name an existing file.") from error
    except (ValueError, AttributeError, TypeError) as error:
        raise UsageError(f"training.deepspeed.config: {path}: not a JSON object of DeepSpeed settings.") from error
    for key in sorted(named & FROM_THE_RECIPE.keys()):
        raise UsageError(f"training.deepspeed.config: {path}: {key} comes from the recipe's {FROM_THE_RECIPE[key]}.")
    for key in sorted(REFUSED.keys() & zero.keys()):
        if zero[key]:
            raise UsageError(
                f"training.deepspeed.config: {path}: zero_optimization.{key} is {shown(zero[key])}: it {REFUSED[key]}. "
                "Remove it."
            )
    return settings
