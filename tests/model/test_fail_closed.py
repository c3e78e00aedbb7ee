"""Native code takes over nothing that it does not know, and nothing that it computes otherwise than torch."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from machine import needs_compiler
from model.test_native_step import shaped
from models import LIKE_LLAMA
from plugins.two_gates import TwoGates
from torch import Tensor, nn

from lmlong.attention.feature_maps import Elu
from lmlong.attention.inputs import Gate, GateProjection
from lmlong.attention.registry import CAUSAL, native_kinds
from lmlong.model import block, native_step
from lmlong.model.fast_step import StepMismatch, make_fast_step, why_no_fast_step
from lmlong.model.language_model import LanguageModel
from lmlong.model.rope import apply_rope
from lmlong.native import build as native_build
from lmlong.native.decode import step
from lmlong.recipe import Attention, Downsample, Rope

pytestmark = needs_compiler

TRIED: dict[str, Any] = {
    "layers": 3,
    "attention": Attention(kind=["linear", "window", "ngram"], window=5),
    "positions": "rotary",
}


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What was compiled in a test is not that of the next."""
    yield
    native_step.library.cache_clear()


class Steeper(Elu):
    """Another map under the native form of its parent."""

    def query(self, q: Tensor) -> Tensor:
        return super().query(2 * q)


def with_a_subclass(model: LanguageModel) -> None:
    model.blocks[0].mixer.attention.feature_map = Steeper(8)


def with_a_hook(model: LanguageModel) -> None:
    model.blocks[1].mlp.register_forward_hook(lambda module, inputs, output: 2 * output)


def with_a_forward_of_its_own(model: LanguageModel) -> None:
    model.norm.forward = lambda x: x  # type: ignore[method-assign]


def with_another_weight(model: LanguageModel) -> None:
    model.blocks[0].mixer.bias = nn.Parameter(torch.ones(16))


def with_a_bias(model: LanguageModel) -> None:
    model.blocks[0].mixer.out_proj = nn.Linear(16, 16)


def with_another_gate(model: LanguageModel) -> None:
    model.blocks[0].mixer.forget_gate = GateProjection(16, Gate("forget_gate", "sigmoid", torch.zeros(2)))


def in_float64(model: LanguageModel) -> None:
    model.double()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (with_a_subclass, r"blocks\.0\.mixer\.attention\.feature_map: Steeper declares no native form"),
        (with_a_hook, r"blocks\.1\.mlp: has hooks"),
        (with_a_forward_of_its_own, r"norm: has a forward set on the instance"),
        (with_another_weight, r"the model: has blocks\.0\.mixer\.bias, which is not supported"),
        (with_a_bias, r"out_proj: declares bias, which is not supported"),
        (with_another_gate, r"forget_gate: is a sigmoid gate"),
        (in_float64, r"in torch\.float64; native code computes in float32"),
    ],
)
def test_what_native_code_does_not_know_is_left_to_torch(change: Any, reason: str) -> None:
    model = shaped(TRIED)
    assert why_no_fast_step(model) is None
    change(model)
    with pytest.raises(AssertionError):
        make_fast_step(model)
    with pytest.raises(AssertionError, match=reason):
        assert why_no_fast_step(model) is None, why_no_fast_step(model)


def test_an_attention_of_another_kind_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CAUSAL, "window", lambda *sizes_and_options: TwoGates(*sizes_and_options[:3]))
    assert "TwoGates declares no native form" in str(why_no_fast_step(shaped(TRIED)))


PLANTED = {
    "an epsilon": ("features.h", "sum / size + epsilon", "sum / size + 1e-5f"),
    "a missing gate": ("gates.h", "if (!forgetting.gate.weight) return 0;", "return 0;"),
    "a decay of the new key": ("linear/decode.h", "z[f] * decay + key;", "(z[f] + key) * decay;"),
    "half of the rotation": ("mixer.h", "half = head_dim / 2; i < half;", "half = head_dim / 2; i < half / 2;"),
    "a shorter window": ("key_values.h", "Int begin = 0, end;", "Int begin = 1, end;"),
    "a tap of the convolution": ("mixer.h", "t < past; t++, tail", "t < past - 1; t++, tail"),
    "a lost head norm": ("mixer.h", "y[i] *= factor * layer", "y[i] *= layer"),
    "a value read before it is written": ("ngram/decode.h", "if (match.now) add(v);", ""),
    "a count of one head alone": ("ngram/decode.h", "head * heads + h]", "head * heads + head]"),
}


GROUPED: dict[str, Any] = {"heads": 4, **LIKE_LLAMA}
PLANTED_IN_GROUPED = {
    "another head's key": ("mixer.h", "kv_head = head / sharing", "kv_head = head % layer.kv_heads"),
    "a value of its own": ("mixer.h", "values + kv_head * value_dim", "values + head % 2 * value_dim"),
    "the epsilon of features": ("step.cpp", "rms_norm_scale(x, width, model.norm_epsilon)", "rms_norm_scale(x, width)"),
    "a gate that is not there": ("mixer.h", "layer.gated ? gate[i]", "!layer.gated ? gate[i]"),
}


BOTH = "parallel_window/decode.h"
BESIDE: dict[str, Any] = {"attention": Attention(kind=["linear", "delta"], parallel_window=5)}
PLANTED_BESIDE = {
    "the other's share": (BOTH, "y[i] = share * near[i] + (1 - share)", "y[i] = (1 - share) * near[i] + share"),
    "keys of the window for the recurrence": (BOTH, "nearby.q = q, nearby.k = k;", "nearby.q = q;"),
    "queries that stay scaled": (BOTH, "nearby.q = q, nearby.k = k;", "nearby.k = k;"),
    "a window without positions": (BOTH, "layer.rotates && !layer.uses_rope", "false"),
}


GROWING: dict[str, Any] = {**GROUPED, "attention": Attention(kind="softmax")}
PLANTED_IN_GROWING = {
    "a key that is not kept": (
        "key_values.h",
        "copy(past.cached.k, input.k, head_dim, after.k);",
        "",
    ),
    "the values of another head": (
        "softmax/decode.h",
        "line = input.row * kv_heads + input.kv_head;",
        "line = input.row;",
    ),
    "logits that are not scaled": ("key_values.h", "scale = 1 / std::sqrt(float(head_dim))", "scale = 1"),
    "a new token that no other sees": ("key_values.h", "current_after[kept] = true;", "current_after[kept] = false;"),
    "keys appended by one head alone": (
        "softmax/decode.h",
        "if (input.head % sharing) return;",
        "if (input.head) return;",
    ),
}


def plant(monkeypatch: pytest.MonkeyPatch, folder: Path, file: str, before: str, after: str) -> None:
    """Compile a copy of the sources with one difference, in the engine or in the header of a kind of attention."""
    shutil.copytree(step.CODE, folder / "decode", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    kinds = [kind for kind in native_kinds().values() if kind.header == kind.headers.get(file)]
    source = folder / "decode" / file
    if kinds:
        source.parent.mkdir()
        shutil.copy(kinds[0].header, source)
    assert source.read_text().count(before) == 1
    source.write_text(source.read_text().replace(before, after))
    monkeypatch.setenv("LMLONG_CACHE", str(folder))
    monkeypatch.setattr(step, "CODE", folder / "decode")
    original = step.kind_headers
    planted = {file: source.read_text()} if kinds else {}
    monkeypatch.setattr(step, "kind_headers", lambda kinds: {**original(kinds), **planted})
    monkeypatch.setattr(native_build, "FLAGS", [flag.replace("-O3", "-O0") for flag in native_build.FLAGS])  # sooner
    native_step.library.cache_clear()


@pytest.mark.parametrize("planted", PLANTED)
def test_a_mistake_in_native_code_is_found_when_a_step_is_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, planted: str
) -> None:
    plant(monkeypatch, tmp_path, *PLANTED[planted])
    with pytest.raises(StepMismatch, match=r"native code differs from torch by .*--no-fast-decode"):
        make_fast_step(shaped(TRIED))


@pytest.mark.parametrize("planted", PLANTED_IN_GROUPED)
def test_so_is_one_in_what_a_llama_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, planted: str) -> None:
    plant(monkeypatch, tmp_path, *PLANTED_IN_GROUPED[planted])
    with pytest.raises(StepMismatch):
        make_fast_step(shaped(GROUPED))


@pytest.mark.parametrize("planted", PLANTED_BESIDE)
def test_so_is_one_in_a_window_beside_a_recurrence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, planted: str
) -> None:
    plant(monkeypatch, tmp_path, *PLANTED_BESIDE[planted])
    with pytest.raises(StepMismatch):
        make_fast_step(shaped(BESIDE))


@pytest.mark.parametrize("planted", PLANTED_IN_GROWING)
def test_so_is_one_in_a_state_that_grows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, planted: str) -> None:
    plant(monkeypatch, tmp_path, *PLANTED_IN_GROWING[planted])
    with pytest.raises(StepMismatch):
        make_fast_step(shaped(GROWING))


def test_so_is_one_in_the_blocks_of_an_hourglass(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plant(monkeypatch, tmp_path, "step.cpp", "into[i] /= model.hourglass.factor", "into[i] /= 3")
    with pytest.raises(StepMismatch):
        make_fast_step(shaped({"layers": 3, "downsample": Downsample(factor=4)}))


def test_so_is_a_change_of_the_model_that_native_code_did_not_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    def rotate_half_of_the_head(x: Tensor, positions: Tensor, options: Rope) -> Tensor:
        rotated, rest = x.chunk(2, dim=-1)
        return torch.cat([apply_rope(rotated, positions, options), rest], dim=-1)

    monkeypatch.setattr(block, "apply_rope", rotate_half_of_the_head)
    with pytest.raises(StepMismatch):
        make_fast_step(shaped(TRIED))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("const float *norm, *conv_weight,", "const float *conv_weight, *norm,"),
        ("Int gated; ", "Int gated, another; "),
        ("float embedding_scale; ", "double embedding_scale; "),
    ],
    ids=["swapped", "added", "of another type"],
)
def test_structures_of_another_layout_do_not_compile(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, before: str, after: str
) -> None:
    plant(monkeypatch, tmp_path, "job.h", before, after)
    with pytest.warns(UserWarning, match="in Python"):
        assert native_step.library() is None
    assert "could not be compiled" in str(why_no_fast_step(shaped(TRIED)))
