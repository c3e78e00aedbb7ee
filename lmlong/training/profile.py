"""Profiles of short training steps. Each runs in its own process, so that the peak memory of the process is the
step's."""

import json
import os
import statistics
import subprocess
import sys
from importlib import import_module
from typing import NamedTuple

import torch

from lmlong.attention.base import state_tensors
from lmlong.attention.device_policy import policy_of
from lmlong.attention.plugins import LOADED, load_plugin
from lmlong.errors import LmlongError
from lmlong.model.base import TextModel, count_parameters
from lmlong.model.device import peak_memory, synchronize
from lmlong.model.kernel_check import checked_kernels
from lmlong.model.language_model import LanguageModel
from lmlong.recipe import Recipe
from lmlong.recipe.file import recipe_class
from lmlong.training.distillation import Teacher, taught_loss
from lmlong.training.optimizer import LoopOptimizer
from lmlong.training.prepare import PreparedRun, prepare_run
from lmlong.training.progress import CLOCKS, TICK

TIMED_STEPS, ENOUGH_SECONDS, LONG_SECONDS = 7, 4.0, 10.0
"""Number of timed steps, the total seconds after which fewer are enough, and the seconds of a first step after which no
other is timed."""

DOCUMENT = 1000
"""Tokens of each document in the profiled text, rounded down to whole blocks."""


class BatchShape(NamedTuple):
    """The shape of the batch of a forward pass."""

    rows: int
    time: int
    segment: int | None  # tokens held at once; None for all of a row


class StepProfile(NamedTuple):
    """The measured cost of a step, and sizes that depend only on the recipe."""

    peak: int  # bytes: of the GPU, or of the process
    work: float  # seconds by `training.clock` of a forward and backward pass
    update: float  # seconds of the optimizer update
    parameters: int
    moments: int  # numbers that the optimizer keeps
    state: int  # bytes of the state of one row


def profile_step(recipe: Recipe, shape: BatchShape, exact: bool = False) -> StepProfile:
    """Profile a few steps on batches of one shape, in another process.

    With `exact` the allocator returns freed memory at once: the peak is the memory in use, but steps take longer.
    """
    child = subprocess.run(
        [sys.executable, "-m", __name__],
        input=json.dumps([list(LOADED), recipe.model_dump_json(), shape, 1 if exact else TIMED_STEPS]),
        env={**os.environ, **({"MALLOC_MMAP_THRESHOLD_": "262144"} if exact else {})},
        capture_output=True,
        text=True,
    )
    if child.returncode != 0:
        last = (child.stderr.strip().splitlines() or ["killed, perhaps for lack of memory"])[-1]
        raise LmlongError(f"--dry-run: a step of {shape.rows} x {shape.time:,} tokens failed: {last}")
    return StepProfile(*json.loads(child.stdout))


def _profile(recipe: Recipe, shape: BatchShape, timed: int) -> StepProfile:
    import_module("lightning.pytorch")  # a real run imports it too, and it takes memory
    prepared = prepare_run(recipe)
    model = prepared.model.to(prepared.device)
    if isinstance(model, LanguageModel):
        model.round_weights(recipe.training.quantize)
        names, _ = checked_kernels(model, prepared.recipe.training.precision, True, prepared.device)
        model.use_kernels(names)
        if prepared.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()  # the check of kernels does not count
    if isinstance(prepared.teacher, Teacher):
        prepared.teacher.model.to(prepared.device)
    optimizer = LoopOptimizer(model, prepared.recipe.training, policy_of(prepared.device))
    works, updates, now = [], [], CLOCKS[recipe.training.clock]
    for number in range(1 + timed):
        begun = now()
        parts = min(prepared.recipe.training.accumulate, 2)
        for _ in range(parts):
            _backward(model, prepared, shape)
        synchronize(prepared.device)
        works.append(max(now() - begun, TICK) / parts)
        begun = now()
        optimizer.step()
        synchronize(prepared.device)
        updates.append(now() - begun)
        if sum(works) + sum(updates) > (ENOUGH_SECONDS if number else LONG_SECONDS):
            break
    # the first step includes one-time work, which is negligible in a long step
    work, update = (statistics.median(times[1:] or times) for times in (works, updates))
    state = sum(tensor.nbytes for tensor in state_tensors(model.init_state(1)))
    peak = peak_memory(prepared.device)
    if peak is None:
        raise LmlongError("this system does not report the memory of a process")
    moments = sum(moment.numel() for of_weight in optimizer.weights.state.values() for moment in of_weight.values())
    return StepProfile(peak, work, update, count_parameters(model), moments, state)


def _backward(model: TextModel, prepared: PreparedRun, shape: BatchShape) -> None:
    """Add the gradient of one batch of random text."""
    recipe = prepared.recipe
    device = model.embedding.weight.device
    # an encoder's last embedding is the mask token, which is never a target
    tokens = torch.randint(model.embedding.num_embeddings - 1, (shape.rows, shape.time), device=device)
    document = DOCUMENT // recipe.model.factor * recipe.model.factor
    document_starts = (torch.arange(shape.time, device=device) % document == 0).expand(shape.rows, -1)
    mask = document_starts if recipe.objective == "causal" else torch.zeros_like(document_starts)
    dtype = {"bf16": torch.bfloat16, "16": torch.float16}.get(recipe.training.precision)
    with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
        if recipe.training.learn:
            assert isinstance(model, LanguageModel)
            loss, _ = model.learning_loss(tokens, tokens, mask)
        else:
            loss, _, _ = taught_loss(model, prepared.teacher, tokens, tokens, mask, segment=shape.segment)
    (loss / tokens.numel()).backward()


if __name__ == "__main__":
    plugins, text, shape_of_batch, times = json.load(sys.stdin)
    for plugin in plugins:
        load_plugin(plugin)
    print(json.dumps(_profile(recipe_class().model_validate_json(text), BatchShape(*shape_of_batch), times)))
