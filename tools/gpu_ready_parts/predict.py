"""The time of a training step of `medium` on an H200, predicted by the bytes and the operations of its kernels.

A step runs with tensors that have shapes and no values. Each of its operations takes the larger of its bytes by the
bandwidth and its operations by the rate of matrix products, plus a launch. What torch.compile runs is traced, and
Inductor fuses it for a GPU whose properties are made up; each fused kernel then costs the same. Rates are those that
one H200 reached (docs/results-gpu.md), so the uncompiled step can be compared with its measured parts.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.library import custom_op
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily
from torch.utils._pytree import tree_leaves, tree_map

from gpu_ready_parts.compiled import Target
from gpu_ready_parts.counts import VOCABULARY
from gpu_ready_parts.flex import made_up_gpu
from gpu_ready_parts.watch import Watch, launches
from lmlong.attention.compiling import GPU_OPTIONS, STEP_OPTIONS, compiled
from lmlong.attention.device_policy import GPU_POLICY, use_policy
from lmlong.model import layers
from lmlong.model.base import quantize
from lmlong.model.language_model import LanguageModel
from lmlong.model.segments import text_loss
from lmlong.recipe import Recipe
from lmlong.report.table import Column, format_table
from lmlong.training.optimizer import LoopOptimizer

BANDWIDTH = 2.7e12
"""Bytes a second that small operations move, of the 4.8 TB/s that the maker states."""

PRODUCTS = 681e12
"""Operations a second of a product of two matrices of 8,192 x 8,192."""

LAUNCH = 2e-6
"""Seconds from one kernel to the next."""

SLOWER = {"linear attention": 1.7, "norms": 1.7, "concatenations": 1.4}
"""Parts that take longer than their bytes at this bandwidth, and how many times."""

MEASURED = {
    "products": 40,
    "linear attention": 17,
    "multiplications": 56,
    "copies and conversions": 18,
    "concatenations": 12,
    "norms": 14,
    "the rest": 57,
}
"""Milliseconds of a step on one row of TOKENS, uncompiled, with activation checkpointing and AdamW."""

TOKENS, LIMIT, AGREES = 32768, 95, 0.2
"""Tokens of the row, milliseconds of a compiled step at most, and how far a part of the uncompiled one may be off."""

LAYER_KERNELS = 12
"""Kernels of a layer in a compiled decode step, at most."""

COMPILED = {"training.compile": True}
KEPT = {**COMPILED, "training.activation_checkpointing": False}
AS_MEASURED = {"model.attention.kind": "linear", "training.optimizer": "adamw"}
STEPS: dict[str, tuple[dict[str, Any], bool]] = {
    "plain": (AS_MEASURED, False),
    "fused": ({**AS_MEASURED, **COMPILED}, False),
    "kept": ({**AS_MEASURED, **KEPT}, False),
    "packed": ({**AS_MEASURED, **KEPT}, True),
    "medium": (KEPT, True),
    "delta": ({**AS_MEASURED, **KEPT, "model.attention.kind": "delta"}, True),
}
"""The steps that are predicted: overrides of the recipe, and whether rows hold several documents."""

COMPILE = torch.compile

FUSED = "fused operations"

PARTS = {
    "mm": "products",
    "bmm": "products",
    "baddbmm": "products",
    "triton": "linear attention",
    "mul": "multiplications",
    "mul_": "multiplications",
    "_to_copy": "copies and conversions",
    "copy_": "copies and conversions",
    "clone": "copies and conversions",
    "cat": "concatenations",
    "norm": "norms",
}
"""The part of an operation of torch."""


class Cost(NamedTuple):
    """What a kernel moves and computes."""

    part: str
    bytes: int
    operations: int = 0

    @property
    def milliseconds(self) -> float:
        moved = self.bytes * SLOWER.get(self.part, 1) / BANDWIDTH
        return 1e3 * (max(moved, self.operations / PRODUCTS) + LAUNCH)


class Costs(Watch):
    """Collects what is launched."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[Cost] = []

    def call(self, function: Any, args: Any, kwargs: Any) -> Any:
        before = self.count
        result = super().call(function, args, kwargs)
        if launches(function) and self.count == before + 1:
            given, made = tensors((args, kwargs)), tensors(result)
            name = "triton" if "triton" in str(function) else str(function).split(".")[1].split("::")[-1]
            looked_up = made if name in ("embedding", "gather", "index") else given
            part = PARTS.get(name.removesuffix("_backward"), "the rest")
            self.kernels.append(Cost(part, size(looked_up) + size(made), product_operations(name, given, made)))
        return result

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context in which nothing is counted. In it, torch.compile traces, which it would not in a mode."""
        active = _get_current_dispatch_mode() is self
        with _pop_mode_temporarily() if active else nullcontext():
            yield

    @property
    def milliseconds(self) -> float:
        return sum(kernel.milliseconds for kernel in self.kernels)


def tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def size(some: Sequence[Tensor]) -> int:
    return sum(x.numel() * x.itemsize for x in some)


def product_operations(name: str, given: Sequence[Tensor], made: Sequence[Tensor]) -> int:
    """Return the operations of a product of matrices, or 0."""
    return 2 * made[0].numel() * given[-1].shape[-2] if name in ("mm", "bmm", "baddbmm") else 0


class Graph(NamedTuple):
    """A graph that torch.compile made: of a block or of the loss, forward or backward."""

    backward: bool
    kernels: list[Cost]


def compile_for(
    costs: Costs, graphs: list[Graph], gpu_options: dict[str, Any], function: Callable[..., Any], **_: Any
) -> Callable[..., Any]:
    """Return a compiled function that costs the kernels of its graphs, which are appended to a list."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    def compiler(module: torch.fx.GraphModule, inputs: list[Any], backward: bool) -> Callable[..., Any]:
        with costs.paused():
            graph = Graph(backward, kernels_of(module, inputs, gpu_options))
        graphs.append(graph)

        def run(*arguments: Any) -> Any:
            costs.kernels += graph.kernels
            with costs.paused():
                return module.forward(*arguments)

        return make_boxed_func(run)  # type: ignore[no-any-return]

    backend = aot_autograd(
        fw_compiler=partial(compiler, backward=False),
        bw_compiler=partial(compiler, backward=True),
        partition_fn=min_cut_rematerialization_partition,
        decompositions={**select_decomp_table(), **(VECTOR_PRODUCTS if gpu_options is STEP_OPTIONS else {})},
    )
    traced = COMPILE(function, backend=backend)

    def call(*arguments: Any) -> Any:
        with costs.paused():
            return traced(*arguments)

    return call


def vector_product(a: Tensor, b: Tensor) -> Any:
    """Decompose a product with one vector as Inductor does on a GPU by STEP_OPTIONS; a CPU traces it as it is."""
    if a.shape[-2] != 1 and b.shape[-1] != 1:
        return NotImplemented
    return (a.float().unsqueeze(-1) * b.float().unsqueeze(-3)).sum(-2).to(a.dtype)


VECTOR_PRODUCTS = dict.fromkeys((torch.ops.aten.mm.default, torch.ops.aten.bmm.default), vector_product)


class FusedError(Exception):
    """Ends the compilation of a graph once its kernels are known."""


def kernels_of(module: torch.fx.GraphModule, inputs: list[Any], options: dict[str, Any]) -> list[Cost]:
    """Return the kernels into which Inductor fuses a graph that was traced on a CPU."""
    from torch._guards import detect_fake_mode
    from torch._inductor import config as inductor
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.scheduler import NopKernelSchedulerNode, Scheduler

    kernels: list[Cost] = []

    def take(scheduler: Scheduler) -> None:
        for node in scheduler.nodes:
            if not isinstance(node, NopKernelSchedulerNode):
                operations = node.estimate_flops() if node.is_extern() else 0
                kernels.append(Cost(part_of(node), bytes_of(node), operations or 0))
        raise FusedError

    module, mode = copy.deepcopy(module), detect_fake_mode(inputs)
    assert mode is not None
    with (
        made_up_gpu([]),
        inductor.patch(options),
        patch.object(Scheduler, "codegen", take),
        patch("torch._inductor.scheduler.has_triton", lambda *_: True),
        patch.object(Tensor, "copy_", lambda x, *_: x),  # of tensors without values
        mode,
    ):
        for node in module.graph.nodes:
            node.meta = {name: tree_map(on_gpu, value) for name, value in node.meta.items() if name == "val"}
            if "device" in node.kwargs:
                node.kwargs = {**node.kwargs, "device": torch.device("cuda:0")}
        try:
            compile_fx_inner(module, [on_gpu(x) for x in inputs])
        except Exception as error:
            if FusedError.__name__ not in repr(error):
                raise
    return kernels


def on_gpu(x: Any) -> Any:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda:0") if isinstance(x, Tensor) else x


def bytes_of(node: Any) -> int:
    if part_of(node) == "linear attention":  # what it writes would count twice
        return sum(int(x.get_numel()) * x.get_dtype().itemsize for x in node.node.inputs)
    return int(node.get_read_write_buffers_sizes())


def part_of(node: Any) -> str:
    if not node.is_extern():
        return FUSED
    return "linear attention" if "Triton" in type(node.node).__name__ else "products"


@custom_op("gpu_ready::norm", mutates_args=())
def norm(x: Tensor) -> Tensor:
    """The RMS norm as a GPU computes it: one kernel, where a CPU has many."""
    return torch.empty_like(x)


@custom_op("gpu_ready::norm_backward", mutates_args=())
def norm_backward(dy: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(x)


norm.register_fake(torch.empty_like)
norm_backward.register_fake(lambda dy, x: torch.empty_like(x))
norm.register_autograd(
    lambda ctx, dy: norm_backward(dy, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@contextmanager
def faked(costs: Costs, graphs: list[Graph], recipe: Recipe, options: dict[str, Any]) -> Iterator[LanguageModel]:
    """A context of tensors without values, in which compiled graphs are costed: yields a model."""
    from triton.runtime import driver

    model = LanguageModel(recipe.model, VOCABULARY, recipe.training.activation_checkpointing is not False)
    use_policy(model, GPU_POLICY)
    model.use_kernel("triton")
    if recipe.training.compile:
        model.compile_blocks()
    driver.set_active(Target(90))
    fakes = FakeTensorMode()
    with FakeCopyMode(fakes):
        model = copy.deepcopy(model)
    compiled.cache_clear()
    torch._dynamo.reset()
    compiles = recipe.training.compile or options is STEP_OPTIONS
    by_kernel = layers.rms_norm if compiles else lambda x, *_, **__: norm(x)
    with (
        fakes,
        patch.object(torch, "compile", partial(compile_for, costs, graphs, options)),
        patch.object(layers, "rms_norm", by_kernel),
        costs.autotuned(),
    ):
        yield model
    compiled.cache_clear()


def step_costs(recipe: Recipe, tokens: int = TOKENS, documents: bool = False) -> tuple[Costs, list[Graph]]:
    """Return the kernels of a training step on one row, and the graphs that torch.compile made for it."""
    costs, graphs = Costs(), list[Graph]()
    with faked(costs, graphs, recipe, GPU_OPTIONS) as model:
        optimizer = LoopOptimizer(model, recipe.training, GPU_POLICY)
        row = torch.zeros(1, tokens + 1, dtype=torch.long)
        starts = torch.zeros(1, tokens, dtype=torch.bool) if documents else None
        for _ in range(2):  # the first makes the optimizer's moments
            costs.kernels.clear()
            with costs, torch.autocast("cpu", dtype=torch.bfloat16):
                nll, _ = text_loss(model, row[:, :-1], row[:, 1:], starts)
            with costs:
                nll.backward()
                optimizer.step()
    return costs, graphs


def decode_graphs(recipe: Recipe) -> list[Graph]:
    """Return the graphs of the blocks of a compiled decode step of one text, with weights in bfloat16."""
    costs, graphs = Costs(), list[Graph]()
    with faked(costs, graphs, recipe, STEP_OPTIONS) as model, torch.no_grad(), costs:
        quantize(model, "bf16")
        use_policy(model, GPU_POLICY)
        model.step_is_compiled = True
        model.decode_step(torch.zeros(1, dtype=torch.long), model.init_state(1))
    return graphs


def check(tokens: int = TOKENS, only: Sequence[str] = tuple(STEPS)) -> tuple[dict[str, Any], list[str], list[str]]:
    """Return the figures of some steps, a table of them, and what is not as it should be."""
    made = {name: step_costs(Recipe.load("medium", STEPS[name][0]), tokens, STEPS[name][1]) for name in only}
    steps = {name: parts_of(costs.kernels) for name, (costs, _) in made.items()}
    parts = [*MEASURED, FUSED]
    columns = [Column("ms", 22, align="<"), Column("measured", 9), *(Column(name, 8, ".1f") for name in steps)]
    rows: list[list[Any]] = [
        [part, MEASURED.get(part, ""), *(of.get(part, "") for of in steps.values())] for part in parts
    ]
    rows.append(["all", sum(MEASURED.values()), *(sum(of.values()) for of in steps.values())])
    rows.append(["kernels", "", *(f"{len(costs.kernels):,}" for costs, _ in made.values())])
    rows.append(["GB moved", "", *(sum(kernel.bytes for kernel in costs.kernels) / 1e9 for costs, _ in made.values())])
    lines = format_table(columns, rows)
    blocks = {f"{name}, {of}": figures for name, (_, graphs) in made.items() for of, figures in first_block(graphs)}
    for block, (count, size) in blocks.items():
        lines.append(f"the first block, {block}: {count} kernels, {size / 1e9:.2f} GB")
    layer = len(decode_graphs(Recipe.load("medium", AS_MEASURED))[0].kernels)
    lines.append(f"a layer of a compiled decode step: {layer} kernels")
    found = [] if layer <= LAYER_KERNELS else [f"a layer decodes by {layer} kernels, more than {LAYER_KERNELS}"]
    if tokens == TOKENS:
        found += failures(steps)
    return {"steps": steps, "blocks": blocks, "decode kernels": layer}, lines, found


def first_block(graphs: Sequence[Graph]) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the kernels and the bytes of the first block, forward and backward."""
    for backward, name in ((False, "forward"), (True, "backward")):
        kernels = next((graph.kernels for graph in graphs if graph.backward == backward), None)
        if kernels:
            yield name, (len(kernels), sum(kernel.bytes for kernel in kernels))


def parts_of(kernels: Sequence[Cost]) -> dict[str, float]:
    """Return the milliseconds of each part."""
    parts: dict[str, float] = {}
    for kernel in kernels:
        parts[kernel.part] = parts.get(kernel.part, 0) + kernel.milliseconds
    return parts


def failures(steps: dict[str, dict[str, float]]) -> list[str]:
    """Return what is predicted otherwise than it was measured, or wanted."""
    found = []
    for part, measured in MEASURED.items():
        predicted = steps["plain"].get(part, 0.0) if "plain" in steps else measured
        if abs(predicted / measured - 1) > AGREES:
            found.append(f"{part} take {predicted:.0f} ms, and {measured} were measured")
    kept = sum(steps.get("kept", {}).values())
    if kept > LIMIT:
        found.append(f"a compiled step takes {kept:.0f} ms, more than {LIMIT}")
    return found
