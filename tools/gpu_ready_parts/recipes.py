"""Training steps of the recipes for GPUs by calculation: their memory, and the share of the peak that they allow."""

from typing import NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from gpu_ready_parts.watch import Watch
from lmlong.attention.device_policy import GPU_POLICY, use_policy
from lmlong.model.base import count_parameters
from lmlong.model.language_model import LanguageModel
from lmlong.recipe import Recipe
from lmlong.report.table import Column, format_table

LAUNCH = 5e-6
"""Seconds that a CPU takes to launch an operation, about."""

USABLE = 0.9
"""The share of a GPU's memory that tensors may take: the rest is fragments, the CUDA context and compiled kernels."""


class GPU(NamedTuple):
    """Figures of a GPU, as its maker states them."""

    name: str
    bytes: float
    operations: float  # a second, in bf16 with float32 sums
    bandwidth: float  # bytes a second


GPUS = (GPU("RTX 4090", 24e9, 165e12, 1.01e12), GPU("H100", 80e9, 989e12, 3.35e12))

RECIPES = ("small", "medium")


class Step(NamedTuple):
    """A forward and backward pass of a recipe on one batch."""

    recipe: str
    kernel: str
    rows: int
    tokens: int
    bytes: int  # at the peak, with weights, gradients and the moments of AdamW
    matrices: int  # weights of the matrices that each token is multiplied by
    repeats: bool  # the forward pass, for activation checkpointing
    operations: int
    moved: int  # bytes

    def seconds(self, gpu: GPU) -> tuple[float, float, float]:
        """Return the least seconds of matrix products, of all other operations, and of the launches."""
        passes = 8 if self.repeats else 6
        return (
            passes * self.matrices * self.tokens / gpu.operations,
            self.moved / gpu.bandwidth,
            self.operations * LAUNCH,
        )

    def share(self, gpu: GPU) -> float:
        """Return the share of the peak that is possible at most, of 6 operations for each weight and token."""
        products, others, launches = self.seconds(gpu)
        needed = 6 * self.matrices * self.tokens / gpu.operations
        return needed / max(products + others, launches)


def step(name: str, kernel: str, rows: int | None = None) -> Step:
    """Return a step of a recipe; `rows` replaces its batch size."""
    recipe = Recipe.load(name)
    rows, length = rows or recipe.training.batch_size, recipe.text.sequence_length
    repeats = recipe.training.activation_checkpointing
    with FakeTensorMode(), Watch() as watch:
        model = LanguageModel(recipe.model, recipe.text.tokenizer.most_tokens, repeats)
        use_policy(model, GPU_POLICY)
        model.use_kernel(kernel)
        parameters, before = count_parameters(model), watch.count
        tokens = torch.zeros(rows, length, dtype=torch.long)
        watch.moved = 0
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss, _ = model.loss(tokens, tokens, torch.zeros(rows, length, dtype=torch.bool))
        (loss / tokens.numel()).backward()
    linear = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
    matrices = linear + model.lm_head.weight.numel()
    held = watch.peak + 8 * parameters  # two moments in float32
    return Step(name, kernel, rows, rows * length, held, matrices, repeats, watch.count - before, watch.moved)


def check() -> tuple[list[Step], list[str]]:
    """Return a step of each recipe by each kernel, and what does not fit into the smaller GPU."""
    steps = [step(name, kernel) for name in RECIPES for kernel in ("torch", "triton")]
    gpu = GPUS[0]
    failures = [
        f"{one.recipe} by {one.kernel}: {one.bytes / 1e9:.1f} GB do not fit into {gpu.bytes / 1e9:g} GB"
        for one in steps
        if one.bytes > USABLE * gpu.bytes
    ]
    return steps, failures


def lines(steps: list[Step]) -> list[str]:
    """Return a table of the memory of the steps, and their least milliseconds on each GPU."""
    columns = [
        Column("recipe", 8, align="<"),
        Column("kernel", 7, align="<"),
        Column("rows", 5),
        Column("GB", 6, ".1f"),
    ]
    columns += [Column("launches", 9, ","), Column("  GPU", 11, align="<"), Column("products", 9, ".1f")]
    columns += [Column("others", 7, ".1f"), Column("launching", 10, ".1f"), Column("share", 6, ".0%")]
    cells = []
    for one in steps:
        for gpu in GPUS:
            known = [one.recipe, one.kernel, one.rows, one.bytes / 1e9, one.operations]
            milliseconds = [1e3 * seconds for seconds in one.seconds(gpu)]
            cells.append([*known, f"  {gpu.name}", *milliseconds, one.share(gpu)])
    return format_table(columns, cells)
