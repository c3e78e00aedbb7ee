"""What torch.compile makes of a block and of the loss for a GPU, without one: graphs are traced on a CPU, and compiled
for a GPU whose properties are made up, up to the code of their kernels.

Of a block this is the forward pass of training with several documents. Like `flex`, it fits some versions of torch.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from gpu_ready_parts import flex
from gpu_ready_parts.compiled import Target
from lmlong.attention.device_policy import GPU_POLICY, use_policy
from lmlong.attention.linear.triton import TritonLinear
from lmlong.model.block import Block
from lmlong.model.language_model import LanguageModel
from lmlong.model.loss import _loss_and_gradient
from lmlong.recipe import Recipe

GPU, ROWS, TIME = torch.device("cuda:0"), 2, 256

KINDS = {
    "linear": {"model.attention.kind": "linear"},
    "no decay": {"model.attention.kind": "linear", "model.attention.decay": "none"},
    "FAVOR+": {"model.attention.kind": "linear", "model.attention.feature_map": "favor"},
}

LIMIT = 40
"""Maximum number of kernels of a block. Uncompiled, it launches over 70 operations to read (`count`)."""


class Compiled:
    """The kernels of a graph."""

    def __init__(self, code: str):
        self.own = re.findall(r"^\s+(\w+)\.run\(", code, re.MULTILINE)
        self.products = len(re.findall(r"extern_kernels\.\w*mm\(", code))


def check() -> tuple[dict[str, Compiled], list[str]]:
    """Compile a block of each kind, and the loss. Return their kernels, and what failed."""
    calls: dict[str, Callable[[], Compiled]] = {**{kind: partial(block, kind) for kind in KINDS}, "loss": loss}
    found: dict[str, Compiled] = {}
    failures = []
    for name, call in calls.items():
        try:
            found[name] = call()
        except Exception as error:
            failures.append(f"{name}: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
            continue
        if len(found[name].own) > LIMIT:
            failures.append(f"{name}: {len(found[name].own)} kernels are more than {LIMIT}")
    return found, failures


def lines(found: dict[str, Compiled]) -> list[str]:
    return [
        "compiled        kernels  products",
        *(f"{name:15} {len(one.own):7} {one.products:9}" for name, one in found.items()),
    ]


def block(kind: str) -> Compiled:
    """Compile a block of the recipe `medium` with another attention."""
    recipe = Recipe.load("medium", dict(KINDS[kind]))
    model = LanguageModel(recipe.model, 300)
    use_policy(model, GPU_POLICY)
    with patch.object(TritonLinear, "unavailable_reason", classmethod(lambda *_: None)):
        model.use_kernel("triton")
    tokens = torch.zeros(ROWS, TIME, dtype=torch.long)
    state = model.init_state(ROWS)
    x, positions = model.embed(tokens, state, torch.zeros(ROWS, TIME, dtype=torch.bool))
    x = x.detach().requires_grad_()

    def run(compiler: Callable[..., Any]) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            compiler(Block.forward)(model.blocks[0], x, state.blocks[:1], positions)

    return first_graph(run)


def loss() -> Compiled:
    """Compile the loss of a chunk of logits."""

    def run(compiler: Callable[..., Any]) -> None:
        compiler(_loss_and_gradient)(torch.zeros(64, 4096, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.long))

    return first_graph(run)


class FoundError(Exception):
    """Ends a call whose graph or code is known."""


def first_graph(run: Callable[[Callable[..., Any]], None]) -> Compiled:
    """Compile the first graph of a call for a GPU."""
    from functorch.compile import min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table
    from triton.runtime import driver

    found: list[Any] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        found.extend((graph, inputs))
        raise FoundError

    options = {"decompositions": select_decomp_table(), "partition_fn": min_cut_rematerialization_partition}
    backend = aot_autograd(fw_compiler=keep, **options)  # type: ignore[no-untyped-call]
    torch._dynamo.reset()
    driver.set_active(Target(90))
    try:
        run(lambda function: torch.compile(function, backend=backend, fullgraph=True, dynamic=False))
    except Exception:
        if not found:
            raise
    return compile_for_gpu(*found)


def compile_for_gpu(graph: torch.fx.GraphModule, inputs: list[Any]) -> Compiled:
    from torch._inductor.graph import GraphLowering

    codes: list[str] = []
    codegen = GraphLowering.codegen

    def take(self: Any, *arguments: Any, **options: Any) -> Any:
        code, *_ = codegen(self, *arguments, **options)
        codes.append(code.value)
        raise FoundError(flex.TAKEN)

    for node in graph.graph.nodes:  # tensors that the graph makes itself
        if isinstance(node.kwargs.get("device"), torch.device):
            node.kwargs = {**node.kwargs, "device": GPU}
        node.args = tuple(GPU if isinstance(value, torch.device) else value for value in node.args)
    with (
        torch.no_grad(),
        flex.made_up_gpu([]),
        patch.object(GraphLowering, "codegen", take),
        patch("torch._inductor.scheduler.has_triton", lambda *_: True),
    ):
        flex.compile_for_gpu(graph, inputs)
    return Compiled(*codes)
