"""Which kernel computes an attention, and how directly."""

import sys
from types import FrameType, FunctionType, MethodType

import pytest
import torch
from attention.cases import build, inputs

from lmlong import recipe
from lmlong.attention.base import CausalAttention
from lmlong.attention.delta.chunk import ChunkKernel as DeltaChunks
from lmlong.attention.linear.chunk import ChunkKernel as LinearChunks
from lmlong.attention.ngram.sort import SortKernel
from lmlong.model.language_model import LanguageModel

KINDS = {"linear": (LinearChunks, "forward"), "delta": (DeltaChunks, "forward"), "ngram": (SortKernel, "read")}


def attention_of(kind: str) -> CausalAttention:
    return build(recipe.Attention(kind=kind))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_an_attention_names_the_kernel_that_it_was_given(kind: str) -> None:
    attention = attention_of(kind)
    assert attention.kernel_name == "native"
    attention.use_kernel("torch")
    assert attention.kernel_name == "torch" and type(attention.kernel) is KINDS[kind][0]
    attention.use_kernel("a kernel that there is not")
    assert attention.kernel_name == "torch"


@pytest.mark.parametrize("kind", KINDS)
def test_a_kernel_is_at_most_three_calls_from_the_attention(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    cls, method = KINDS[kind]
    attention, depths = attention_of(kind), []
    original = getattr(cls, method)

    def measured(*given: object) -> object:
        frame: FrameType | None = sys._getframe(1)
        depth = 1
        while frame is not None and frame.f_locals.get("self") is not attention:
            # the frames of torch between `apply` and `forward` are none of ours
            depth += "/torch/" not in frame.f_code.co_filename
            frame = frame.f_back
        depths.append(depth)
        return original(*given)

    monkeypatch.setattr(cls, method, measured)
    attention.use_kernel("torch")
    q, k, v, starts, *rest = inputs(attention, 70, torch.float32)
    named = {name: x for name, x in zip(attention.inputs, rest, strict=True) if x is not None}
    attention(q, k, v, attention.init_state(2, v.device, v.dtype), starts, named)
    assert depths and max(depths) <= 3


def test_compiling_assigns_no_function_to_an_attention() -> None:
    kinds = ["linear", "delta", "ngram"]
    model = LanguageModel(recipe.Model(width=16, layers=3, heads=2, attention=recipe.Attention(kind=kinds)), 50)  # type: ignore[arg-type]
    model.compile_blocks()
    for attention in model.attentions:
        assert attention.compiled
        assert not [x for x in vars(attention).values() if isinstance(x, FunctionType | MethodType)]
