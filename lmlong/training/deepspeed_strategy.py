"""Training with DeepSpeed: each rank holds a part of the training state, a checkpoint holds all of it.

Checkpoints are the same with and without DeepSpeed: whole weights and moments, under the optimizer's own names and
numbers. Any number of ranks, any stage, and training without DeepSpeed can resume from them, and no file in DeepSpeed's
pickle format is ever read.
"""

import importlib
import logging
import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from itertools import accumulate
from typing import Any

import torch
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from torch import Tensor

from lmlong import recipe
from lmlong.attention.base import CausalAttention
from lmlong.attention.encoder.base import EncoderAttention
from lmlong.model.base import TextModel
from lmlong.training.deepspeed_config import settings
from lmlong.training.module import TrainingModule
from lmlong.training.muon import Muon
from lmlong.training.optimizer import moments_of, parameter_groups
from lmlong.training.orthogonal import DividedMatrix

LEFT_BEHIND = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK")
"""Environment variables by which the processes of one run find each other."""

LARGEST_BUCKET = 500_000_000
"""Maximum number of gradients summed over the ranks at a time, DeepSpeed's default."""


class DeepSpeedTraining(DeepSpeedStrategy):
    """DeepSpeed on GPUs or CPU processes, with checkpoints in lmlong's own format."""

    def __init__(self, options: recipe.Training, device: torch.device):
        self.options, self.on_cpu = options, device.type == "cpu"
        self.environment = {name: os.environ.get(name) for name in LEFT_BEHIND}
        if self.on_cpu:
            _prepare_for_cpu()
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
        super().__init__(
            config=settings(options, device),
            precision_plugin=DeepSpeedAutocast(device, options.precision),
            process_group_backend="gloo" if self.on_cpu else None,
            logging_level=logging.ERROR,
        )

    @property
    def parallel_devices(self) -> list[torch.device]:
        """The devices; CPU ranks are numbered too, since DeepSpeed distinguishes ranks by the number."""
        return [torch.device("cpu", n) for n in range(len(self._devices))] if self.on_cpu else self._devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        self._devices = devices or []

    def setup_environment(self) -> None:
        if self.on_cpu:  # skips DeepSpeedStrategy's check for a GPU
            DDPStrategy.setup_environment(self)
        else:
            super().setup_environment()

    def setup(self, trainer: Any) -> None:
        model = self.text_model
        groups = parameter_groups(model, self.options)
        # the weights in the order in which the optimizer numbers them, with the names of their moments
        self.moments = [(weight, moments_of(group)) for group in groups for weight in group["params"]]
        muon = [group for group in groups if "stacks" in group]
        self.stacks = {id(w): heights for g in muon for w, heights in zip(g["params"], g["stacks"], strict=True)}
        # DeepSpeed's default allocates half a billion gradients, whatever the size of the model
        room = min(LARGEST_BUCKET, sum(weight.numel() for weight, _ in self.moments))
        assert self.config is not None
        self.config["zero_optimization"].setdefault("reduce_bucket_size", room)
        if self.zero_stage_3:
            model.partitioned = True
            _register_external_parameters(model)
        super().setup(trainer)
        if isinstance(optimizer := self.zero_optimizer.optimizer, Muon):
            optimizer.partition = self

    def teardown(self) -> None:
        """Undo the changes to the process and its environment: later runs in it, or started by it, must not join this
        one."""
        super().teardown()
        import deepspeed.comm

        deepspeed.comm.destroy_process_group()
        for name, value in self.environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    def lightning_module_state_dict(self) -> dict[str, Any]:
        weights = self.text_model.state_dict()
        if self.zero_stage_3:
            weights |= {name: self._whole(weight) for name, weight in self.text_model.named_parameters()}
        return {name: tensor.detach().cpu() for name, tensor in weights.items()}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the state of the optimizer as without DeepSpeed, with moments gathered from all ranks; all ranks call
        this."""
        steps = [state["step"] for state in optimizer.optimizer.state.values() if "step" in state]
        self._link()
        state: dict[int, dict[str, Tensor]] = {}
        for number, (weight, names) in enumerate(self.moments if steps else []):  # none before a step was taken
            state[number] = {n: steps[0].clone() if n == "step" else self._whole(weight, n) for n in names}
        return {"state": state}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load this rank's part of the optimizer's moments."""
        (saved,) = checkpoint["optimizer_states"]
        if not saved["state"]:
            return
        numbers = {id(weight): number for number, (weight, _) in enumerate(self.moments)}
        for flat, weights in self._parts():
            moments = [saved["state"][numbers[id(weight)]] for weight in weights]
            self.zero_optimizer.optimizer.state[flat] = {
                name: first.clone() if name == "step" else self.part_of(flat, [each[name] for each in moments])
                for name, first in moments[0].items()
            }

    @property
    def text_model(self) -> TextModel:
        assert isinstance(self.lightning_module, TrainingModule)
        return self.lightning_module.model

    @property
    def zero_optimizer(self) -> Any:
        """DeepSpeed's optimizer, which holds ours as its own `optimizer`."""
        return self.optimizers[0]

    def matrices(self, part: Tensor) -> list[DividedMatrix]:
        """Return the matrices of a flat tensor of weights, for Muon."""
        matrices = []
        for weight, begin, size in self._spans(part):
            _, width = weight.ds_shape if self.zero_stage_3 else weight.shape
            first, span, offset = (0, size, begin) if self.zero_stage_3 else (begin, len(part), 0)
            for height in self.stacks[id(weight)]:
                matrices.append(DividedMatrix((height, width), first, span, offset))
                first += height * width
        return matrices

    def part_of(self, part: Tensor, weights: list[Tensor]) -> Tensor:
        """Return this rank's part of whole weights, or of their moments."""
        every = torch.zeros(self.world_size, len(part), dtype=part.dtype, device=weights[0].device)
        for (_, begin, size), weight in zip(self._spans(part), weights, strict=True):
            if self.zero_stage_3:
                padded = weight.new_zeros(self.world_size * size)
                padded[: weight.numel()] = weight.flatten()
                every[:, begin : begin + size] = padded.view(self.world_size, size)
            else:
                every.view(-1)[begin : begin + size] = weight.flatten()
        return every[self.global_rank].to(part.device)

    def _spans(self, part: Tensor) -> list[tuple[Any, int, int]]:
        """Return the weights of a flat tensor, with the offset and size of each. They refer to the concatenated tensors
        of all ranks, or in stage 3, which divides each weight separately, to the tensor of each rank."""
        (weights,) = (weights for flat, weights in self._parts() if flat is part)
        sizes = [weight.ds_tensor.ds_numel if self.zero_stage_3 else weight.numel() for weight in weights]
        return list(zip(weights, accumulate(sizes, initial=0), sizes, strict=False))

    def _parts(self) -> list[tuple[Tensor, list[Any]]]:
        """Return this rank's parts of the weights that the optimizer updates: flat tensors, each with its weights."""
        zero = self.zero_optimizer
        if self.zero_stage_3:
            return list(zip(zero.fp32_partitioned_groups_flat, zero.fp16_groups, strict=True))
        return list(zip(zero.single_partition_of_fp32_groups, zero.bit16_groups, strict=True))

    def _link(self) -> None:
        """Link each weight to its moments: DeepSpeed links them only once, when only its first group has moments."""
        from deepspeed.utils.mixed_precision_linkage import lazy_init_hp_params_optimizer_state

        if not self.zero_stage_3:
            for flat, weights in self._parts():
                lazy_init_hp_params_optimizer_state(weights, flat, self.zero_optimizer.optimizer.state)

    def _whole(self, weight: Tensor, moment: str | None = None) -> Tensor:
        """Gather a weight, or the optimizer's moment of it, on the first rank, which saves it; all ranks call this."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        whole = safe_get_full_optimizer_state(weight, moment) if moment else safe_get_full_fp32_param(weight)
        return whole.detach().cpu() if self.is_global_zero else torch.empty(0)


class DeepSpeedAutocast(DeepSpeedPrecision):
    """float32 weights, with products in bfloat16 if the recipe says so. Numbers are the same as without DeepSpeed, and
    sums of gradients over a thousand segments are not rounded."""

    def __init__(self, device: torch.device, numbers: str):
        super().__init__("32-true")
        self.device, self.rounds = device, numbers == "bf16"

    def train_step_context(self) -> Any:
        """Return no autocast: DeepSpeed switches off any autocast around it, so the step enters its own."""
        return nullcontext()

    def forward_context(self) -> Any:
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.rounds)

    def backward(self, tensor: Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        # Lightning has already divided by the number of accumulated batches
        model.trainer.model.backward(tensor, scale_wrt_gas=False)

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> None:  # type: ignore[override]
        closure()
        engine = model.trainer.model
        done = engine.is_gradient_accumulation_boundary()
        engine.step()
        if done:  # clipped by DeepSpeed, which has read whether the norm is finite, and skipped the update if not
            norm = engine.get_global_grad_norm()
            # stays on the device; a number is filled in there, since copying it would wait
            model.must_skip(norm if isinstance(norm, Tensor) else torch.full((), norm, device=model.device))


def _prepare_for_cpu() -> None:
    """Prepare DeepSpeed for a CPU, without the shared-memory kernels that it would compile at each start."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]


def _register_external_parameters(model: TextModel) -> None:
    """Register weights that other modules use: DeepSpeed gathers weights only for the module that owns them."""
    import deepspeed

    deepspeed.zero.register_external_parameter(model.lm_head, model.lm_head.weight)
    for module in model.modules():
        if isinstance(module, CausalAttention | EncoderAttention):
            for weight in (weight for part in module.children() for weight in part.parameters()):
                deepspeed.zero.register_external_parameter(module, weight)
