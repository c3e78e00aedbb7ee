"""Training with DeepSpeed: each rank holds a part of the training state, a checkpoint holds all of it.

A checkpoint is the same with and without DeepSpeed: weights and AdamW's moments whole, under the names and numbers
AdamW itself uses. So any number of ranks, any stage, and training without DeepSpeed resume from it, and nothing that
DeepSpeed writes, or would have to unpickle, is ever read.
"""

import importlib
import logging
import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, Strategy
from torch import Tensor

from lmlong import recipe
from lmlong.attention.base import CausalAttention
from lmlong.attention.encoder.base import EncoderAttention
from lmlong.model.base import TextModel
from lmlong.training.deepspeed_config import settings
from lmlong.training.module import TrainingModule
from lmlong.training.optimizer import by_decay

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's names of its state for each weight, beside the number of steps."""

LEFT_BEHIND = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK")
"""Environment variables by which the processes of one run find each other."""


class DeepSpeedTraining(DeepSpeedStrategy):
    """DeepSpeed on GPUs, or on processes of a CPU, with checkpoints of our own format."""

    def __init__(self, options: recipe.Training, device: torch.device):
        self.on_cpu = device.type == "cpu"
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
        """The devices, with a number for each rank of a CPU too, since DeepSpeed tells ranks apart by it."""
        return [torch.device("cpu", n) for n in range(len(self._devices))] if self.on_cpu else self._devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        self._devices = devices or []

    def setup_environment(self) -> None:
        if self.on_cpu:  # as the library's own, without its check for a GPU
            DDPStrategy.setup_environment(self)
        else:
            super().setup_environment()

    def setup(self, trainer: Any) -> None:
        model = self.text_model
        self.order = [weight for group in by_decay(model) for weight in group]  # in which AdamW numbers weights
        if self.zero_stage_3:
            model.partitioned = True
            _register_external_parameters(model)
        super().setup(trainer)

    def teardown(self) -> None:
        """Restore the process: another run in it, or one that it starts, is no part of this one."""
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
        """Return what AdamW alone would save: its moments of each weight, gathered from all ranks; all call this."""
        kept = optimizer.optimizer.state.get(self._flat_parts()[0])  # none before the first step that was not skipped
        self._link()
        state = {
            number: {"step": kept["step"].clone(), **{mean: self._whole(weight, mean) for mean in MOMENTS}}
            for number, weight in enumerate(self.order if kept else [])
        }
        return {"state": state}

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load this rank's part of AdamW's moments."""
        optimizer = self.zero_optimizer
        (saved,) = checkpoint["optimizer_states"]
        if not saved["state"]:
            return
        for flat in self._flat_parts():
            state = optimizer.optimizer.state[flat]
            state["step"] = saved["state"][0]["step"].clone()
            state |= {mean: torch.zeros_like(flat) for mean in MOMENTS}
        self._link()
        for number, weight in enumerate(self.order):
            for mean in MOMENTS:
                self._take(weight, mean, saved["state"][number][mean])

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Do nothing: the model had the checkpoint's weights before they were divided."""

    # a checkpoint is written and read as without DeepSpeed
    save_checkpoint = Strategy.save_checkpoint
    load_checkpoint = Strategy.load_checkpoint

    @property
    def text_model(self) -> TextModel:
        assert isinstance(self.lightning_module, TrainingModule)
        return self.lightning_module.model

    @property
    def zero_optimizer(self) -> Any:
        """DeepSpeed's optimizer, which holds AdamW as its own `optimizer`."""
        return self.optimizers[0]

    def _flat_parts(self) -> list[Tensor]:
        """Return this rank's part of the weights that AdamW updates, one tensor for each of its groups."""
        zero = self.zero_optimizer
        return zero.fp32_partitioned_groups_flat if self.zero_stage_3 else zero.single_partition_of_fp32_groups

    def _link(self) -> None:
        """Link each weight to AdamW's moments of it: DeepSpeed does it once, when only its first group has any."""
        from deepspeed.utils.mixed_precision_linkage import lazy_init_hp_params_optimizer_state

        if not self.zero_stage_3:
            zero = self.zero_optimizer
            for weights, flat in zip(zero.bit16_groups, self._flat_parts(), strict=True):
                lazy_init_hp_params_optimizer_state(weights, flat, zero.optimizer.state)

    def _whole(self, weight: Tensor, mean: str | None = None) -> Tensor:
        """Gather a weight, or AdamW's mean of it, on the first rank, which saves it; all ranks call this."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        whole = safe_get_full_optimizer_state(weight, mean) if mean else safe_get_full_fp32_param(weight)
        return whole.detach().cpu() if self.is_global_zero else torch.empty(0)

    def _take(self, weight: Any, mean: str, whole: Tensor) -> None:
        """Load this rank's part of AdamW's mean of a weight."""
        from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

        if not self.zero_stage_3:
            safe_set_full_optimizer_state(weight, whole.to(weight.device), mean)
            return
        size = weight.ds_tensor.numel()
        padded = torch.zeros(size * self.world_size).index_copy(0, torch.arange(whole.numel()), whole.flatten())
        safe_set_local_optimizer_state(weight, padded[size * self.global_rank :][:size].to(weight.device), mean)


class DeepSpeedAutocast(DeepSpeedPrecision):
    """float32 weights, and products in bfloat16 where the recipe says so: the numbers of training without DeepSpeed,
    and sums of gradients over a thousand segments that do not round."""

    def __init__(self, device: torch.device, numbers: str):
        super().__init__("32-true")
        self.device, self.rounds = device, numbers == "bf16"

    def train_step_context(self) -> Any:
        """Return no autocast: DeepSpeed switches off any that is on around it, so the step enters its own."""
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
        if done:  # clipped by DeepSpeed, which skips the update where the norm is not finite
            model.accept(float(engine.get_global_grad_norm()))


def _prepare_for_cpu() -> None:
    """Make DeepSpeed run on a CPU, without the shared-memory kernels that it would compile at each start."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]


def _register_external_parameters(model: TextModel) -> None:
    """Register weights with other modules that use them: weights are gathered for the module that they belong to."""
    import deepspeed

    deepspeed.zero.register_external_parameter(model.lm_head, model.embedding.weight)
    for module in model.modules():
        if isinstance(module, CausalAttention | EncoderAttention):
            for weight in (weight for part in module.children() for weight in part.parameters()):
                deepspeed.zero.register_external_parameter(module, weight)
