"""A kind of attention brings its own native decode step: the engine need not know it."""

import ctypes
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from machine import needs_compiler
from model.test_native_step import shaped
from torch import Tensor, nn

from lmlong.attention.base import CausalAttention
from lmlong.attention.inputs import NOTHING, Inputs
from lmlong.attention.registry import CAUSAL
from lmlong.model import native_step
from lmlong.model.fast_step import make_fast_step, why_no_fast_step
from lmlong.model.native_step import NativeStep
from lmlong.native.build import MORE_FLAGS
from lmlong.native.decode.kind import DecodeKind, Packer
from lmlong.native.decode.structures import pointers, structure
from lmlong.native.spec import NativeSpec
from lmlong.recipe import Attention

pytestmark = needs_compiler

HEADER = """
#pragma once
#include "mixer.h"

namespace {

struct FadingSum {
    struct Weights { float kept; };
    struct State { float* S; };

    const Weights& weights;
    const Int heads, V;

    FadingSum(const DecodeJob& job, const Layer&, const Weights& weights, Scratch&)
        : weights(weights), heads(job.model->heads), V(job.model->value_dim) {}

    void step(const HeadInput& input, const State& before, const State& after, float* y) const {
        const Int first = (input.row * heads + input.head) * V;
        for (Int i = 0; i < V; i++) y[i] = after.S[first + i] = weights.kept * before.S[first + i] + input.v[i];
    }
};

}  // namespace
"""


class FadingState(NamedTuple):
    S: Tensor  # (B, H, V)


class FadingDecode(DecodeKind[FadingState]):
    name = "FadingSum"
    weights = structure("FadingSum::Weights", ("kept", ctypes.c_float))
    state = structure("FadingSum::State", *pointers(*FadingState._fields))

    def pack(self, packer: Packer, attention: Any, gates: Mapping[str, nn.Module]) -> ctypes.Structure:
        return self.weights(packer.open(attention, "fading_sum").options["kept"])


class FadingSum(CausalAttention[FadingState]):
    """S_t = S_(t-1) / 2 + v_t, y_t = S_t."""

    native_decode = FadingDecode()

    def __init__(self, heads: int, head_dim: int, value_dim: int):
        super().__init__()
        self.heads, self.head_dim, self.value_dim = heads, head_dim, value_dim

    def init_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> FadingState:
        return FadingState(torch.zeros(batch, self.heads, self.value_dim))

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: FadingState,
        document_starts: Tensor | None = None,
        inputs: Inputs = NOTHING,
    ) -> tuple[Tensor, FadingState]:
        S, outputs = state.S, []
        for t in range(v.shape[2]):
            S = S / 2 + v[:, :, t]
            outputs.append(S)
        return torch.stack(outputs, dim=2), FadingState(S)

    def reference(self, *arguments: Any) -> Tensor:
        raise NotImplementedError

    def native_spec(self) -> NativeSpec:
        return NativeSpec("fading_sum", {"kept": 0.5})


@pytest.fixture(autouse=True)
def header(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The header of the kind, in a folder as those of lmlong, and models in which it takes the place of a window."""
    path = tmp_path / "fading_sum" / "decode.h"
    path.parent.mkdir(parents=True)
    path.write_text(HEADER)
    monkeypatch.setattr(FadingSum.native_decode, "header", path, raising=False)
    monkeypatch.setitem(CAUSAL, "window", lambda *sizes_and_options: FadingSum(*sizes_and_options[:3]))
    monkeypatch.setenv("LMLONG_CACHE", str(tmp_path))
    monkeypatch.setenv(MORE_FLAGS, "-O0")  # compiles sooner
    native_step.library.cache_clear()
    yield path
    native_step.library.cache_clear()


MIXED = {"layers": 4, "attention": Attention(kind=["window", "linear", "ngram", "softmax"])}


def test_a_kind_with_a_header_of_its_own_is_decoded_by_native_code() -> None:
    """`make_fast_step` compares its steps, among layers of other kinds, with those of torch."""
    assert isinstance(make_fast_step(shaped(MIXED)), NativeStep)


def test_a_state_of_another_layout_does_not_compile(header: Path) -> None:
    header.write_text(HEADER.replace("struct State { float* S; }", "struct State { float *S, *z; }"))
    with pytest.warns(UserWarning, match="FadingSum::State has other fields in Python"):
        assert native_step.library() is None


def test_a_kind_without_one_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FadingSum, "native_decode", None)
    assert "FadingSum has no native decode step" in str(why_no_fast_step(shaped(MIXED)))
