"""What a run would take, from two of its real steps."""

import resource
import sys
import time
from typing import NamedTuple

import torch

from lmlong.model.language_model import parameters
from lmlong.recipe import Recipe
from lmlong.training.loader import as_tensors
from lmlong.training.optimizer import make_optimizer
from lmlong.training.setup import Setup, set_up

KEPT_CHECKPOINTS = 3
"""The newest, the best, and the one being written."""


class Plan(NamedTuple):
    """What a run would take."""

    parameters: int
    steps: int
    tokens: int
    precision: str
    seconds_per_step: float
    peak_bytes: int
    disk_bytes: int

    def text(self) -> str:
        """The plan as lines to read."""
        hours, minutes = divmod(round(self.steps * self.seconds_per_step / 60), 60)
        return "\n".join(
            (
                f"parameters   {self.parameters:,}",
                f"steps        {self.steps:,} of {self.tokens // self.steps:,} tokens: {self.tokens:,} tokens in all",
                f"time         {self.seconds_per_step:.2f} s a step ({self.precision}): {hours} h {minutes:02d} min, "
                "validation not counted",
                f"memory       {self.peak_bytes / 2**30:.2f} GiB at the peak of a step",
                f"disk         {self.disk_bytes / 2**20:,.0f} MiB for checkpoints",
            )
        )


def measure(recipe: Recipe) -> Plan:
    """Build the model, take two real steps, time the second."""
    setup = set_up(recipe)
    options = setup.recipe.training
    model = setup.model.to(setup.device)
    optimizer = make_optimizer(model, options)
    seconds = 0.0
    for step in range(2):
        begun = time.perf_counter()
        for part in range(options.accumulate):
            _learn(setup, step * options.accumulate + part)
        torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip)
        optimizer.step()
        optimizer.zero_grad()
        if setup.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begun
    count = parameters(model)
    # float32 weights, and AdamW's two means of the same size
    disk = KEPT_CHECKPOINTS * 3 * 4 * count
    return Plan(
        count, setup.steps, setup.steps * setup.tokens_per_step, options.precision, seconds, _peak(setup.device), disk
    )


def _learn(setup: Setup, number: int) -> None:
    """Add the gradient of one batch."""
    tokens, targets, starts = (x.to(setup.device) for x in as_tensors(setup.batches().batch(number)))
    dtype = {"bf16": torch.bfloat16, "16": torch.float16}.get(setup.recipe.training.precision)
    with torch.autocast(setup.device.type, dtype=dtype, enabled=dtype is not None):
        nats, _ = setup.model.loss(tokens, targets, starts, setup.recipe.training.segment)
    (nats / targets.numel()).backward()


def _peak(device: torch.device) -> int:
    """The most memory held so far: of the GPU, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
