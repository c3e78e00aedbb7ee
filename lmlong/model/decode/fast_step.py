"""The decode step of a whole model as one operation: native code on a CPU, a CUDA graph on a GPU."""

import torch
from torch import Tensor

from lmlong.attention.base import state_tensors
from lmlong.model.decode import native_step, pack
from lmlong.model.hourglass import BlockPhase
from lmlong.model.language_model import DecodeStep, LanguageModel, ModelState
from lmlong.model.state import rebuild_state
from lmlong.native.build import find_compiler

MAX_GRAPHS = 64
"""Upper limit of torch.compile's recompilations of a step, shared by all models of a process."""


def make_fast_step(model: LanguageModel) -> DecodeStep:
    """Return the fastest decode step for a model whose weights are final."""
    assert no_fast_step(model) is None
    functions = native_step.library() if _on_cpu(model) else None
    return cuda_graph(model.decode_step) if functions is None else native_step.NativeStep(model, functions)


def no_fast_step(model: LanguageModel) -> str | None:
    """Return why there is no fast decode step for a model, or None where there is one."""
    if not model.constant_state:
        return "the state of softmax attention grows, so its step is never the same twice."
    if _on_cpu(model) and find_compiler() is None:
        return "needs a C++ compiler. Install g++, or name one in the environment variable CXX."
    if _on_cpu(model) and not (pack.is_supported(model) and native_step.library()):
        return "there is no native code for this model on this machine."
    return None


def cuda_graph(step: DecodeStep) -> DecodeStep:
    """Return the step as one graph, made by torch.compile at its first call: on a GPU all kernels are recorded and
    replayed for each token; a graph break is an error."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MAX_GRAPHS)
    graph = torch.compile(step, fullgraph=True, dynamic=False, mode="reduce-overhead")

    def replay(token: Tensor, state: ModelState, phase: BlockPhase | None) -> tuple[Tensor, ModelState]:
        torch.compiler.cudagraph_mark_step_begin()
        logits, after = graph(token, state, phase)
        # copied, since the next replay writes to the same memory
        return logits.clone(), rebuild_state(after, iter([x.clone() for x in state_tensors(after)]))

    return replay


def _on_cpu(model: LanguageModel) -> bool:
    return model.embedding.weight.device.type == "cpu"
