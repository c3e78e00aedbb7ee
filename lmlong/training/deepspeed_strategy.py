"""Training with DeepSpeed: each rank holds a part of the training state, a checkpoint holds all of it.

Checkpoints are the same with and without DeepSpeed: whole weights and moments, under the optimizer's own names and
numbers. Any number of ranks, any stage, and training without DeepSpeed can resume from them.
"""

import ctypes
import importlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from torch import Tensor

from lmlong import recipe
from lmlong.attention.base import CausalAttention
from lmlong.attention.encoder.base import EncoderAttention
from lmlong.checkpoint.read import unload
from lmlong.checkpoint.write import Deferred
from lmlong.model.base import TextModel
from lmlong.training.deepspeed_config import set_sizes, settings
from lmlong.training.distributed import time_limit
from lmlong.training.module import TrainingModule
from lmlong.training.muon import Muon
from lmlong.training.optimizer import moments_of, parameter_groups
from lmlong.training.orthogonal import DividedMatrix

LEFT_BEHIND = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK")
"""Environment variables by which the processes of one run find each other."""

M_MMAP_THRESHOLD, LARGE = -3, 1 << 20
"""The option of the C library's allocator for the bytes from which memory is mapped separately, and its value."""


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
            **time_limit(),
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

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Divide weights among the ranks as soon as they are made, in stage 3."""
        from lmlong.training.divided_weights import DividedWeights

        assert isinstance(self.config, dict)
        with DividedWeights(self.config) if self.zero_stage_3 else nullcontext():
            yield

    def setup(self, trainer: Any) -> None:
        model = self.text_model
        groups = parameter_groups(model, self.options)
        # the weights in the order in which the optimizer numbers them, with the names of their moments
        self.moments = [(weight, moments_of(group)) for group in groups for weight in group["params"]]
        muon = [group for group in groups if "stacks" in group]
        self.stacks = {id(w): heights for g in muon for w, heights in zip(g["params"], g["stacks"], strict=True)}
        assert isinstance(self.config, dict)
        set_sizes(self.config["zero_optimization"], trainer.lightning_module.prepared.model)
        if self.zero_stage_3:
            model.partitioned = True
            _register_external_parameters(model)
            trainer.lightning_module.to(self.root_device)  # buffers; DeepSpeed leaves divided models where they are
        super().setup(trainer)
        if self.zero_stage_3:
            self._hold_weights_once()
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
            weights |= {name: self._deferred(weight) for name, weight in self.text_model.named_parameters()}
        return weights

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the state of the optimizer as without DeepSpeed, with moments that are gathered from all ranks when
        they are written."""
        steps = [state["step"] for state in optimizer.optimizer.state.values() if "step" in state]
        self._link()
        state: dict[int, dict[str, Tensor | Deferred]] = {}
        for number, (weight, names) in enumerate(self.moments if steps else []):  # none before a step was taken
            state[number] = {n: steps[0].clone() if n == "step" else self._deferred(weight, n) for n in names}
        return {"state": state}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load this rank's part of the optimizer's moments."""
        (saved,) = checkpoint["optimizer_states"]
        if not saved["state"]:
            return
        numbers = {id(weight): number for number, (weight, _) in enumerate(self.moments)}
        for flat, weights in self._parts():
            moments = [saved["state"][numbers[id(weight)]] for weight in weights]
            own = self.zero_optimizer.optimizer.state[flat] = {}
            for name, first in moments[0].items():
                own[name] = first.clone() if name == "step" else self.part_of(flat, [each[name] for each in moments])
                for each in moments:
                    unload(each[name])

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
        own, rank = torch.zeros_like(part), self.global_rank
        for (_, begin, size), weight in zip(self._spans(part), weights, strict=True):
            numbers, place = weight.flatten(), begin
            if self.zero_stage_3:
                numbers = numbers[rank * size : (rank + 1) * size]
            else:
                first = rank * len(part) - begin  # where this rank's numbers begin, counted from the weight's first
                numbers, place = numbers[max(first, 0) : max(first + len(part), 0)], max(-first, 0)
            own[place : place + len(numbers)] = numbers
        return own

    def _hold_weights_once(self) -> None:
        """Let the optimizer update the weights themselves: DeepSpeed copies them, though they are float32 already."""
        zero = self.zero_optimizer
        for weights, copied in zip(zero.fp16_partitioned_groups_flat, zero.fp32_partitioned_groups_flat, strict=True):
            if weights is not None and weights.device == copied.device and weights.dtype == copied.dtype:
                copied.data = weights

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

    def _deferred(self, weight: Any, moment: str | None = None) -> Deferred:
        """Return a whole weight, or the optimizer's moment of it, that is gathered when it is written."""
        shape = weight.ds_shape if self.zero_stage_3 else weight.shape
        return Deferred(shape, torch.float32, partial(self._whole, weight, moment))

    def _whole(self, weight: Any, moment: str | None) -> Tensor:
        """Gather a weight, or the optimizer's moment of it, on the first rank, which saves it; all ranks call this."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        gathered = safe_get_full_optimizer_state(weight, moment) if moment else safe_get_full_fp32_param(weight)
        return gathered.detach().cpu() if self.is_global_zero else torch.empty(0)


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
            norm = norm if isinstance(norm, Tensor) else torch.full((), norm, device=model.device)
            model.update_rows(model.must_skip(norm))


def _prepare_for_cpu() -> None:
    """Prepare DeepSpeed for a CPU, without the shared-memory kernels that it would compile at each start."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    # weights that are gathered and freed return to the system: between a rank's parts they would leave gaps
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE)
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]


def _register_external_parameters(model: TextModel) -> None:
    """Register weights that other modules use: DeepSpeed gathers weights only for the module that owns them."""
    import deepspeed

    deepspeed.zero.register_external_parameter(model.lm_head, model.lm_head.weight)
    for module in model.modules():
        if isinstance(module, CausalAttention | EncoderAttention):
            for weight in (weight for part in module.children() for weight in part.parameters()):
                deepspeed.zero.register_external_parameter(module, weight)
