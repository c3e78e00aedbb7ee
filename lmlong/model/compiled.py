"""The step of a model as one thing to do: native code on a CPU, a CUDA graph on a GPU."""

from collections.abc import Callable

import torch
from torch import Tensor

from lmlong.attention.contract import tensors
from lmlong.attention.softmax import SoftmaxAttention
from lmlong.model.downsample import Beat
from lmlong.model.language_model import LanguageModel, ModelState
from lmlong.model.native import layout, step
from lmlong.model.states import rebuilt
from lmlong.native.library import find_compiler

Answer = Callable[[Tensor, ModelState, Beat | None], tuple[Tensor, ModelState]]

VARIANTS = 64
"""Graphs that may be made of the code of one step, which all models of a process share."""


def compile_step(model: LanguageModel) -> None:
    """Let a model that learns no more write tokens in the fastest way there is."""
    assert obstacle(model) is None
    functions = step.library() if _on_cpu(model) else None
    answer: Answer = as_graph(model.answer) if functions is None else step.NativeStep(model, functions)
    model.answer = answer  # type: ignore[assignment]


def obstacle(model: LanguageModel) -> str | None:
    """Why the step of a model cannot be compiled."""
    if any(isinstance(block.mixer.attention, SoftmaxAttention) for block in model.blocks):
        return "the state of softmax attention grows, so its step is never the same twice."
    if _on_cpu(model) and find_compiler() is None:
        return "needs a C++ compiler. Install g++, or name one in the environment variable CXX."
    if _on_cpu(model) and not (layout.fits(model) and step.library()):
        return "there is no native code for this model on this machine."
    return None


def as_graph(answer: Answer) -> Answer:
    """The same step as one graph, made by torch.compile when it is first wanted: on a GPU all that it launches is
    recorded, and played back for each token; a break in the graph is an error."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, VARIANTS)
    graph = torch.compile(answer, fullgraph=True, dynamic=False, mode="reduce-overhead")

    def play(token: Tensor, state: ModelState, beat: Beat | None) -> tuple[Tensor, ModelState]:
        torch.compiler.cudagraph_mark_step_begin()
        logits, after = graph(token, state, beat)
        # copied, for the recording writes to the same places when it is played again
        return logits.clone(), rebuilt(after, iter([x.clone() for x in tensors(after)]))

    return play


def _on_cpu(model: LanguageModel) -> bool:
    return model.embedding.weight.device.type == "cpu"
