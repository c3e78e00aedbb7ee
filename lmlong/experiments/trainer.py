"""The training loop of the experiments: small models in float32, on generated batches."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from lmlong import recipe
from lmlong.model.base import TextModel
from lmlong.model.device import pick_device
from lmlong.model.loss import IGNORED
from lmlong.report.progress import each
from lmlong.training.optimizer import LoopOptimizer, learning_rate_factor

Batch = tuple[Tensor, Tensor]
"""Tokens and targets (B, T), where IGNORED is not a target."""

Model = TypeVar("Model", bound=TextModel)


def seeded(seed: int, make: Callable[[], Model]) -> Model:
    """Return a model on the device of this machine, with weights drawn from a seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make().to(pick_device("auto"))


def fit(
    model: TextModel, batches: Callable[[int], Sequence[Batch]], steps: int, learning_rate: float, name: str
) -> None:
    """Train a model with AdamW and a warm-up over a tenth of the steps.

    `batches(step)` are the batches of one step, whose mean losses have equal weight.
    """
    device = model.embedding.weight.device
    options = recipe.Training(
        steps=steps, optimizer="adamw", learning_rate=learning_rate, warmup_steps=max(steps // 10, 1)
    )
    optimizer = LoopOptimizer(model, options)
    for step in each(range(steps), name, steps, "steps"):
        parts = batches(step)
        for batch in parts:
            tokens, targets = (part.to(device) for part in batch)
            nll, _ = model.loss(tokens, targets)
            (nll / (targets != IGNORED).sum() / len(parts)).backward()
        optimizer.step(learning_rate_factor(step, steps, options))
