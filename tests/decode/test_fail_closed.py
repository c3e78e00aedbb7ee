"""Native code takes over nothing that it does not know, and nothing that it computes otherwise than torch. A kind of
attention that brings its own native step is known."""

import ctypes
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from machine import needs_compiler
from model.shapes import shaped
from models import LIKE_LLAMA
from plugins.two_gates import TwoGates
from torch import Tensor, nn

from lmlong.attention.delta.layer import DeltaDecode
from lmlong.attention.feature_maps import Elu
from lmlong.attention.inputs import Gate, GateProjection
from lmlong.attention.ngram.layer import NgramDecode
from lmlong.attention.registry import CAUSAL, native_kinds
from lmlong.attention.softmax.layer import KEY_VALUES
from lmlong.attention.window.layer import WEIGHTS, WindowAttention, WindowDecode
from lmlong.decode import native
from lmlong.decode.choice import EngineMismatch, fast_engine, why_no_fast_engine
from lmlong.decode.native import NativeEngine
from lmlong.model import block
from lmlong.model.rope import apply_rope
from lmlong.native.build import MORE_FLAGS
from lmlong.native.decode import step
from lmlong.native.decode.packer import NoNativeForm, Packer, pack_in_huge_pages
from lmlong.native.decode.step import merged_constants
from lmlong.native.decode.structures import structure
from lmlong.recipe import Attention, Downsample, NgramEmbedding, Rope

pytestmark = needs_compiler

GROUPED: dict[str, Any] = {"heads": 4, **LIKE_LLAMA}
MODELS: dict[str, dict[str, Any]] = {
    "mixed": {
        "layers": 3,
        "attention": Attention(kind=["linear", "window", "ngram"], window=5),
        "positions": "rotary",
    },
    "grouped": GROUPED,
    "growing": {**GROUPED, "attention": Attention(kind="softmax")},
    # heads that fill a vector of AVX-512, which holds 32 numbers in bfloat16
    "cached in bfloat16": {**GROUPED, "head_dim": 32, "value_dim": 32, "attention": Attention(kind="softmax")},
    "parallel window": {"attention": Attention(kind=["linear", "delta"], parallel_window=5)},
    "sink": {**GROUPED, "attention": Attention(kind="window", window=5, window_sink=True)},
    "hourglass": {"layers": 3, "downsample": Downsample(factor=4)},
    "tables": {"ngram_embedding": NgramEmbedding(orders=[2, 3], rows=50, width=5)},
}


class Steeper(Elu):
    """Another map under the native form of its parent."""

    def query(self, q: Tensor) -> Tensor:
        return super().query(2 * q)


CHANGES: dict[str, tuple[str, str, Any, str]] = {
    "a subclass": (
        *("blocks.0.mixer.attention", "feature_map", Steeper(8)),
        r"blocks\.0\.mixer\.attention\.feature_map: Steeper has no native form",
    ),
    "a forward": ("norm", "forward", lambda x: x, r"norm: has a forward set on the instance"),
    "a weight": (
        *("blocks.0.mixer", "bias", nn.Parameter(torch.ones(16))),
        r"the model: has blocks\.0\.mixer\.bias, which is not supported",
    ),
    "a bias": ("blocks.0.mixer", "out_proj", nn.Linear(16, 16), r"out_proj: Linear has no native form"),
    "a module": ("blocks.1.mlp", "adapter", nn.Identity(), r"blocks\.1\.mlp\.adapter: Identity has no native form"),
    "a gate": (
        *("blocks.0.mixer", "forget_gate", GateProjection(16, Gate("forget_gate", "sigmoid", torch.zeros(2)))),
        r"forget_gate: is a sigmoid gate",
    ),
    "a buffer": (*("norm", "register_buffer", ("shift", torch.ones(16))), r"the model: has norm\.shift, which is not"),
    "a hook": ("blocks.1.mlp", "register_forward_hook", (lambda *_: None,), r"blocks\.1\.mlp: has hooks"),
    "float64": ("", "double", (), r"in torch\.float64; native code computes in float32"),
}
"""A part of a model, its attribute or method, the new value or the arguments, and why it is left to torch."""


@pytest.mark.parametrize("name", CHANGES)
def test_a_part_without_a_native_form_is_left_to_torch(name: str) -> None:
    model = shaped(MODELS["mixed"])
    assert why_no_fast_engine(model) is None
    part, attribute, value, reason = CHANGES[name]
    changed = model.get_submodule(part)
    if isinstance(value, tuple):
        getattr(changed, attribute)(*value)
    else:
        setattr(changed, attribute, value)
    with pytest.raises(NoNativeForm):
        fast_engine(model)
    assert re.search(reason, str(why_no_fast_engine(model)))


def test_an_attention_of_another_kind_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CAUSAL, "window", lambda *sizes_and_options: TwoGates(*sizes_and_options[:3]))
    assert "TwoGates has no native decode step" in str(why_no_fast_engine(shaped(MODELS["mixed"])))


FAULTS: dict[str, tuple[str, str, str, str, str]] = {
    "an epsilon": ("mixed", "features.h", "sum / size + @", "epsilon", "1e-5f"),
    "a missing gate": ("mixed", "mixer.h", "if (@)", "!forgetting.gate.weight", "true"),
    "a decay of the new key": ("mixed", "linear/decode.h", "z[f] * decay + @;", "key", "key * decay"),
    "half of the rotation": ("mixed", "mixer.h", "half = rotated / 2; i < @;", "half", "half - 1"),
    "a shorter window": ("mixed", "key_values.h", "Int begin = @, end;", "0", "1"),
    "a tap of the convolution": ("mixed", "mixer.h", "t < @; t++, tail", "past", "past - 1"),
    "a lost head norm": ("mixed", "mixer.h", "y[i] *= @ * layer", "factor", "1"),
    "a value read before it is written": ("mixed", "ngram/decode.h", "if (@)", "match.now", "false"),
    "another head's key": ("grouped", "mixer.h", "kv_head = @", "first / sharing", "first % layer.kv_heads"),
    "the epsilon of features": ("grouped", "step.cpp", "scale(x, width, @)", "model.norm_epsilon", "RMS_EPS"),
    "half of each": ("parallel window", "parallel_window/decode.h", "y[i] = @ * near[i]", "share", "(1 - share)"),
    "keys of the window for the recurrence": (
        *("parallel window", "parallel_window/decode.h", "nearby.k = @;", "k", "input.k"),
    ),
    "no weight for the sink": ("sink", "key_values.h", "= @;", "sink.logits[head]", "-INFINITY"),
    "the window of another head": ("sink", "window/decode.h", "cached{before, @,", "kv_head", "0"),
    "a value in place of a key": ("growing", "key_values.h", "copy(past.cached.k, @,", "new_k", "new_v"),
    "the values of another head": ("growing", "softmax/decode.h", "recent{before.recent, @,", "input.kv_head", "0"),
    "logits that are not scaled": ("growing", "key_values.h", "scale = 1 / @", "std::sqrt(float(head_dim))", "1"),
    "the other half of a lane": (
        *("cached in bfloat16", "cache_products.h", "(FloatVec)(@)", "pairs & int32_t(0xffff0000)", "pairs << 16"),
    ),
    "a sum in place of a mean": ("hourglass", "step.cpp", "into[i] /= @;", "model.hourglass.factor", "1"),
    "the hash of another order": ("tables", "ngrams.h", "n = tables.orders[@]", "i", "0"),
}
"""Faults in native code: the model that shows each, the source, its text around @, what stands there, and the fault."""


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """A library with all faults, each of which `fault` switches on by its index."""
    folder = tmp_path_factory.mktemp("faulty")
    engine = {path.name: path for path in step.CODE.iterdir() if path.suffix in (".h", ".cpp")}
    kinds = {name: path for kind in native_kinds().values() for name, path in kind.headers.items()}
    texts = {name: path.read_text() for name, path in {**engine, **kinds}.items()}
    for number, (_, name, around, right, wrong) in enumerate(FAULTS.values()):
        whole = around.replace("@", right)
        assert texts[name].count(whole) == 1, whole
        texts[name] = texts[name].replace(whole, around.replace("@", f"(fault == {number} ? {wrong} : {right})"))
    texts["job.h"] += 'extern "C" { int fault = -1; }\n'
    for name in engine:
        (folder / name).write_text(texts[name])
    headers_of = step.kind_headers
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LMLONG_CACHE", str(folder / "cache"))
        patch.setenv(MORE_FLAGS, f"{os.environ.get(MORE_FLAGS, '')} -O0")  # compiles sooner
        patch.setattr(step, "CODE", folder)
        patch.setattr(step, "kind_headers", lambda of: {**headers_of(of), **{name: texts[name] for name in kinds}})
        library = native.library.__wrapped__()
    assert library is not None
    return library


@pytest.fixture
def fault(faulty: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[ctypes.c_int]:
    """The switch of the faults, with which steps are made by the faulty library."""
    monkeypatch.setattr(native, "library", lambda: faulty)
    switch = ctypes.c_int.in_dll(faulty, "fault")
    yield switch
    switch.value = -1


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_native_code_is_found_when_a_step_is_made(fault: ctypes.c_int, name: str) -> None:
    model = shaped(MODELS[FAULTS[name][0]])
    model.set_cache_dtype(torch.bfloat16 if FAULTS[name][0] == "cached in bfloat16" else None)
    assert isinstance(fast_engine(model), NativeEngine)
    fault.value = list(FAULTS).index(name)
    with pytest.raises(EngineMismatch, match=r"native code differs from torch by .*--no-fast-decode"):
        fast_engine(model)


def test_a_model_that_differs_from_native_code_is_found_when_a_step_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def rotate_half_of_the_head(x: Tensor, positions: Tensor, options: Rope) -> Tensor:
        rotated, rest = x.chunk(2, dim=-1)
        return torch.cat([apply_rope(rotated, positions, options), rest], dim=-1)

    monkeypatch.setattr(block, "apply_rope", rotate_half_of_the_head)
    with pytest.raises(EngineMismatch):
        fast_engine(shaped(MODELS["mixed"]))


HEADER = WindowDecode.header.read_text().replace("WindowAttention", "OwnWindow")


class OwnDecode(WindowDecode):
    name = "OwnWindow"
    weights = structure("OwnWindow::Weights", *WEIGHTS)
    state = structure("OwnWindow::State", *KEY_VALUES)

    def pack(self, packer: Packer, attention: Any, gates: Mapping[str, nn.Module]) -> ctypes.Structure:
        return self.weights(packer.known(attention, OwnWindow).window)


class OwnWindow(WindowAttention):
    """A window by another name, with a header of its own."""

    native_decode = OwnDecode()


def test_a_kind_with_a_header_of_its_own_is_decoded_by_native_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`fast_engine` compares its steps, among layers of other kinds, with those of torch."""
    header = tmp_path / "own_window" / "decode.h"
    header.parent.mkdir(parents=True)
    header.write_text(HEADER)
    monkeypatch.setattr(OwnDecode, "header", header)
    monkeypatch.setitem(CAUSAL, "window", lambda heads, key, value, options: OwnWindow(heads, key, value, 5))
    monkeypatch.setenv("LMLONG_CACHE", str(tmp_path))
    monkeypatch.setenv(MORE_FLAGS, "-O0")  # compiles sooner
    monkeypatch.setattr(native, "library", native.library.__wrapped__)
    engine = fast_engine(
        shaped({"layers": 4, "attention": Attention(kind=["window", "linear", "ngram", "softmax"])}), tried=True
    )
    assert isinstance(engine, NativeEngine)
    assert engine.packed.kinds[0] is OwnWindow.native_decode


def test_transposed_weight_is_packed_and_a_part_is_not() -> None:
    module = nn.Linear(2, 6, bias=False)
    packer = Packer(module)
    packer.known(module, nn.Linear)
    packer.floats(module, module.weight[:3])
    with pytest.raises(NoNativeForm, match="has weight, which is not supported"):
        packer.check_complete()
    packer.floats(module, module.weight, transposed=True)
    packer.check_complete()


def test_pages_are_large() -> None:
    """Where the system gives large pages to those that ask for them."""
    known = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not known.exists() or "[never]" in known.read_text():
        pytest.skip("there are no large pages")
    weight = torch.randn(4 << 20)
    before = weight.clone()
    pack_in_huge_pages([weight])
    pages = [line for line in Path("/proc/self/smaps_rollup").read_text().splitlines() if "AnonHugePages" in line]
    assert int(pages[0].split()[1]) >= 2 << 10  # kilobytes: memory in pieces may give fewer than were asked for
    assert torch.equal(weight, before)


def test_conflicting_constants_are_refused() -> None:
    """A shared name would otherwise silently give one kind the other's value."""
    kinds = [DeltaDecode(), NgramDecode()]
    name, value = next(iter(DeltaDecode.constants.items()))
    assert merged_constants({name: value}, kinds)[name] == value
    with pytest.raises(AssertionError, match=f"{name} is {value}, but"):
        merged_constants({name: value + 1}, kinds)
