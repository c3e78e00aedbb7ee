"""The health of recurrent states, measured during validation: how much of the past each head keeps.

B batch, H heads, T time, C channels, or 1.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lmlong.attention.linear.layer import LinearAttention
from lmlong.attention.recurrence import Recurrence
from lmlong.model.base import TextModel
from lmlong.model.device import as_float64, float64_device
from lmlong.model.language_model import LanguageModel
from lmlong.training.distributed import all_gather

HeadNumbers = dict[str, list[float | None]]
"""By the name of a measure: its value for each head, or None."""


class StateHealth:
    """The effective memory of each head of a model's recurrences, and the smallest denominator of linear attention.

    The effective memory is the number of tokens after which 1/e of what a head has read is left, at the mean of its log
    decays; None for a head that forgets nothing. For a head with a decay for each channel it is the median over
    channels.
    """

    def __init__(self, model: TextModel):
        self.model = model
        self.heads: dict[int, Tensor] = {}
        """By layer: sums of log decays, counts, and smallest denominators (3, H, C); C is 1 without decays by
        channel."""
        self.layers: dict[int, Recurrence[Any]] = {}
        self.block_sizes: dict[int, int] = {}  # tokens that a layer reads as one
        # in DeepSpeed's stage 3 a weight is whole only in its own module
        if isinstance(model, LanguageModel) and not model.partitioned:
            layers = enumerate(block.mixer.attention for block in model.blocks)
            parts = [(layer, part) for layer, attention in layers for part in attention.parts]
            for layer, attention in parts:
                if isinstance(attention, Recurrence):
                    self.layers[layer] = attention
                    inner = model.hourglass and layer in model.downsampled_layers
                    self.block_sizes[layer] = model.hourglass.factor if model.hourglass and inner else 1
                    channels = attention.feature_map.features if attention.by_channel else 1
                    zeros = torch.zeros(2, attention.heads, channels, dtype=torch.float64)
                    self.heads[layer] = torch.cat([zeros, torch.full_like(zeros[:1], torch.inf)])

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Measure the inputs of the recurrences within the block."""
        with ExitStack() as hooks:
            if isinstance(self.model, LanguageModel):
                hooks.enter_context(self.model.whole_blocks())
                hooks.enter_context(self.model.uncompiled())
            for layer, attention in self.layers.items():
                hooks.callback(attention.register_forward_pre_hook(self._counter(layer)).remove)
            yield

    def by_layer(self, trainer: Trainer) -> list[dict[str, Any]]:
        """Return the numbers of each recurrence, over the inputs of all ranks; all ranks call this together."""
        device = trainer.strategy.root_device if trainer.world_size > 1 else torch.device("cpu")
        gathered = {layer: all_gather(trainer, held.to(device)) for layer, held in self.heads.items()}
        return [{"layer": layer + 1, **self._numbers(layer, held.cpu())} for layer, held in gathered.items()]

    def _counter(self, layer: int) -> Callable[..., None]:
        @torch.no_grad()
        def count(attention: Recurrence[Any], arguments: tuple[Any, ...]) -> None:
            q, *_, inputs = arguments
            if not q.shape[2]:
                return
            log_decay = attention.token_log_decay(q, inputs)
            held = self.heads[layer] = self.heads[layer].to(float64_device(q.device))
            if log_decay is not None:
                held[0] += as_float64(log_decay).sum(dim=(0, 2)).view_as(held[0])
            held[1] += q.shape[0] * q.shape[2]
            if isinstance(attention, LinearAttention):
                smallest = as_float64(attention.denominators(*arguments)).amin(dim=(0, 2))
                held[2] = torch.minimum(held[2], smallest[:, None])

        return count

    def _numbers(self, layer: int, held: Tensor) -> HeadNumbers:
        """Return the numbers of a layer from the sums of one rank (3, H, C) or of all ranks (ranks, 3, H, C)."""
        log_decay, count, smallest = held.reshape(-1, *held.shape[-3:]).unbind(1)
        rate = log_decay.sum(0) / count.sum(0)
        memory = torch.where(rate < 0, -self.block_sizes[layer] / rate, torch.inf).median(-1).values
        numbers = {"effective_memory": [round(tokens, 1) if tokens < torch.inf else None for tokens in memory.tolist()]}
        if isinstance(self.layers[layer], LinearAttention):
            smallest_of_head = smallest.amin((0, -1)).tolist()
            numbers["smallest_denominator"] = [float(f"{x:.4g}") if x < torch.inf else None for x in smallest_of_head]
        return numbers
