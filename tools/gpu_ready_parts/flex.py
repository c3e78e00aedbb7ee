"""The Triton kernels that torch.compile makes of flex attention, as the program calls it, without a GPU.

The calls are traced on a CPU. Their graphs are then compiled for a GPU whose properties are made up. What torch would
ask of a GPU is replaced, functions by name, so this fits some versions of torch only (written for 2.13).
"""

import importlib.util
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

TAKEN = "its code is taken"
"""Why a kernel is not compiled once its code is known."""

HEADS, KV_HEADS, TOKENS, PAST = 4, 2, 600, 177

Kernel = tuple[Any, tuple[Tensor | int, ...], dict[str, Any]]
"""A kernel, its arguments, and the options of its launch."""


def kernels(dtype: torch.dtype, width: int) -> list[Kernel]:
    """Return the kernels of the forward and the backward pass for heads of a width."""
    codes: list[str] = []
    for graph, inputs in graphs(dtype, width):
        with made_up_gpu(codes):
            compile_for_gpu(graph, inputs)
    return [loaded(code) for code in codes]


def graphs(dtype: torch.dtype, width: int) -> list[tuple[torch.fx.GraphModule, list[Any]]]:
    """Return the graphs of the forward and the backward pass, and their inputs, on a CPU."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch.nn.attention import flex_attention as module

    from lmlong.attention import block_sparse
    from lmlong.attention.key_blocks import visible_keys

    found: list[tuple[torch.fx.GraphModule, list[Any]]] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        found.append((graph, inputs))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    compile_function = partial(torch.compile, backend=backend)
    q, k, v = (
        torch.zeros(2, heads, tokens, width, dtype=dtype, requires_grad=True)
        for heads, tokens in ((HEADS, TOKENS), (KV_HEADS, PAST + TOKENS), (KV_HEADS, PAST + TOKENS))
    )
    visible = visible_keys(torch.ones(2, PAST, dtype=torch.bool), torch.zeros(2, TOKENS, dtype=torch.bool), TOKENS)
    # torch refuses gradients on a CPU, where it has no kernel for them
    with (
        patch.object(module, "_validate_device", lambda *_: None),
        patch.object(torch, "compile", compile_function),
    ):
        block_sparse.compiled_kernel.cache_clear()
        block_sparse.by_flex_attention(q, k, v, visible).sum().backward()
    torch._dynamo.reset()
    return found


def compile_for_gpu(graph: torch.fx.GraphModule, inputs: list[Any]) -> None:
    from torch._guards import detect_fake_mode
    from torch._inductor.compile_fx import compile_fx_inner

    def on_gpu(x: Any) -> Any:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda:0") if isinstance(x, Tensor) else x

    mode = detect_fake_mode(inputs)
    assert mode is not None
    with mode:
        for part in graph.modules():
            for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
                node.meta = {name: tree_map(on_gpu, value) for name, value in node.meta.items() if name == "val"}
                # set for a CPU, which has no backward pass
                options = ({**x, "OUTPUT_LOGSUMEXP": True} if isinstance(x, dict) else x for x in node.args)
                if "flex_attention" in str(node.target):
                    node.args = tuple(options)
        try:
            compile_fx_inner(graph, [on_gpu(x) for x in inputs])
        except Exception as error:
            if TAKEN not in str(error) and "No choices" not in str(error):
                raise


@contextmanager
def made_up_gpu(codes: list[str]) -> Iterator[None]:
    """Answer torch's questions for a GPU, and append the code of kernels to `codes` instead of running them."""
    import sys

    import torch._dynamo.device_interface as interfaces
    import torch._inductor.select_algorithm as templates
    from torch._inductor.runtime.hints import DeviceProperties

    known = DeviceProperties("cuda", 0, 108, 80, 8, 65536, 2048, 1024, 32)
    gpu = SimpleNamespace(
        name="", major=8, minor=0, multi_processor_count=108, warp_size=32, total_memory=2**36, gcnArchName=""
    )

    def take(code: str, *_: Any, **__: Any) -> None:
        codes.append(code)
        raise NotImplementedError(TAKEN)  # torch skips a template whose code raises this, and compiles nothing

    def without_copy(x: Tensor, strides: tuple[int, ...]) -> Tensor:
        from torch._inductor.ir import get_fill_order

        return x.new_empty_strided(x.shape, operators._construct_strides(x.shape, get_fill_order(strides)))

    operators = sys.modules["torch._higher_order_ops.flex_attention"]
    answers: dict[str, Any] = {
        "get_device_capability": (8, 0),
        "get_device_properties": gpu,
        "current_device": 0,
        "device_count": 1,
        "is_available": True,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
        "get_rng_state": torch.zeros(16),
        "set_rng_state": None,
    }
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(patch.object(torch.cuda, name, lambda *_, answer=answer: answer))
        stack.enter_context(patch.object(DeviceProperties, "create", staticmethod(lambda _: known)))
        stack.enter_context(
            patch.object(interfaces.CudaInterface.Worker, "get_device_properties", staticmethod(lambda *_: gpu))
        )
        stack.enter_context(patch("torch.utils._triton.triton_hash_with_backend", lambda: ""))
        stack.enter_context(patch.object(templates.PyCodeCache, "load", take))
        stack.enter_context(patch.object(operators, "_permute_strides", without_copy))
        stack.enter_context(torch._inductor.config.patch(fx_graph_cache=False, compile_threads=1))
        yield


def loaded(code: str) -> Kernel:
    """Return the kernel that some generated code defines."""
    types = re.findall(r"'\w+': '(\S+?)'", re.findall(r"'signature': \{([^}]*)\}", code)[0])
    options = {name: int(value) for name, value in re.findall(r"^(num_warps|num_stages)=(\d+)", code, re.MULTILINE)}
    begin, end = code.index("@triton_heuristics"), code.index("@triton.jit", code.index("@triton_heuristics"))
    path = Path(FOLDER.name, f"kernel_{len(list(Path(FOLDER.name).iterdir()))}.py")
    path.write_text(code[:begin] + code[end:])
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    name = re.findall(r"@triton.jit\ndef (\w+)", code)[0]
    return getattr(module, name), tuple(map(argument, types)), options


def argument(kind: str) -> Tensor | int:
    """Return an argument of a type: a size, or a tensor without numbers."""
    return torch.empty(16, dtype=DTYPES[kind[1:]], device="meta") if kind.startswith("*") else TOKENS


FOLDER = tempfile.TemporaryDirectory()
"""The code of the kernels, which Triton reads when it compiles them."""

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "i32": torch.int32, "i1": torch.bool}
