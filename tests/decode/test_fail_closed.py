"""Native code takes over nothing that it does not know, and nothing that it computes otherwise than torch."""

import ctypes
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from decode.test_native import shaped
from machine import needs_compiler
from models import LIKE_LLAMA
from plugins.two_gates import TwoGates
from torch import Tensor, nn

from lmlong.attention.feature_maps import Elu
from lmlong.attention.inputs import Gate, GateProjection
from lmlong.attention.registry import CAUSAL, native_kinds
from lmlong.decode import native
from lmlong.decode.choice import EngineMismatch, fast_engine, why_no_fast_engine
from lmlong.decode.native import NativeEngine
from lmlong.model import block
from lmlong.model.language_model import LanguageModel
from lmlong.model.rope import apply_rope
from lmlong.native.build import MORE_FLAGS
from lmlong.native.decode import step
from lmlong.native.decode.packer import NoNativeForm
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


def replace(part: str, name: str, value: Any) -> Callable[[LanguageModel], None]:
    """Return a change of a model that sets an attribute of one of its parts."""
    return lambda model: setattr(model.get_submodule(part), name, value)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            replace("blocks.0.mixer.attention", "feature_map", Steeper(8)),
            r"blocks\.0\.mixer\.attention\.feature_map: Steeper has no native form",
        ),
        (replace("norm", "forward", lambda x: x), r"norm: has a forward set on the instance"),
        (
            replace("blocks.0.mixer", "bias", nn.Parameter(torch.ones(16))),
            r"the model: has blocks\.0\.mixer\.bias, which is not supported",
        ),
        (replace("blocks.0.mixer", "out_proj", nn.Linear(16, 16)), r"out_proj: Linear has no native form"),
        (
            lambda model: model.norm.register_buffer("shift", torch.ones(16)),
            r"the model: has norm\.shift, which is not supported",
        ),
        (replace("blocks.1.mlp", "adapter", nn.Identity()), r"blocks\.1\.mlp\.adapter: Identity has no native form"),
        (
            replace(
                "blocks.0.mixer", "forget_gate", GateProjection(16, Gate("forget_gate", "sigmoid", torch.zeros(2)))
            ),
            r"forget_gate: is a sigmoid gate",
        ),
        (lambda model: model.blocks[1].mlp.register_forward_hook(lambda *_: None), r"blocks\.1\.mlp: has hooks"),
        (lambda model: model.double(), r"in torch\.float64; native code computes in float32"),
    ],
    ids=["a subclass", "a forward", "a weight", "a bias", "a buffer", "a module", "a gate", "a hook", "float64"],
)
def test_a_part_without_a_native_form_is_left_to_torch(change: Any, reason: str) -> None:
    model = shaped(MODELS["mixed"])
    assert why_no_fast_engine(model) is None
    change(model)
    with pytest.raises(NoNativeForm):
        fast_engine(model)
    assert re.search(reason, str(why_no_fast_engine(model)))


def test_an_attention_of_another_kind_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CAUSAL, "window", lambda *sizes_and_options: TwoGates(*sizes_and_options[:3]))
    assert "TwoGates has no native decode step" in str(why_no_fast_engine(shaped(MODELS["mixed"])))


FAULTS: dict[str, tuple[str, str, str, str]] = {
    "an epsilon": ("mixed", "features.h", "sum / size + epsilon", "sum / size + (FAULT ? 1e-5f : epsilon)"),
    "a missing gate": ("mixed", "mixer.h", "if (!forgetting.gate.weight)", "if (FAULT || !forgetting.gate.weight)"),
    "a decay of the new key": (
        *("mixed", "linear/decode.h", "z[f] * decay + key;"),
        "z[f] * decay + (FAULT ? key * decay : key);",
    ),
    "half of the rotation": (
        "mixed",
        "mixer.h",
        "half = head_dim / 2; i < half;",
        "half = head_dim / 2; i < half - FAULT;",
    ),
    "a shorter window": ("mixed", "key_values.h", "Int begin = 0, end;", "Int begin = FAULT, end;"),
    "a tap of the convolution": ("mixed", "mixer.h", "t < past; t++, tail", "t < past - FAULT; t++, tail"),
    "a lost head norm": ("mixed", "mixer.h", "y[i] *= factor * layer", "y[i] *= (FAULT ? 1 : factor) * layer"),
    "a value read before it is written": ("mixed", "ngram/decode.h", "if (match.now)", "if (match.now && !FAULT)"),
    "another head's key": (
        *("grouped", "mixer.h", "kv_head = first / sharing"),
        "kv_head = FAULT ? first % layer.kv_heads : first / sharing",
    ),
    "the epsilon of features": (
        *("grouped", "step.cpp", "rms_norm_scale(x, width, model.norm_epsilon)"),
        "rms_norm_scale(x, width, FAULT ? RMS_EPS : model.norm_epsilon)",
    ),
    "the other's share": (
        *("parallel window", "parallel_window/decode.h", "const float share ="),
        "const float share = FAULT ? 1 - sigmoid(gate_logit(weights.share, input.head, input.x, width)) :",
    ),
    "keys of the window for the recurrence": (
        *("parallel window", "parallel_window/decode.h", "nearby.k = k;"),
        "nearby.k = FAULT ? input.k : k;",
    ),
    "no weight for the sink": (
        *("sink", "key_values.h", "= sink.logits[head];"),
        "= FAULT ? -INFINITY : sink.logits[head];",
    ),
    "the window of another head": (
        *("sink", "window/decode.h", "cached{before, kv_head,"),
        "cached{before, FAULT ? 0 : kv_head,",
    ),
    "a key that is not kept": (
        *("growing", "key_values.h", "copy(past.cached.k, new_k,"),
        "if (!FAULT) copy(past.cached.k, new_k,",
    ),
    "the values of another head": (
        *("growing", "softmax/decode.h", "recent{before.recent, input.kv_head,"),
        "recent{before.recent, FAULT ? 0 : input.kv_head,",
    ),
    "logits that are not scaled": (
        *("growing", "key_values.h", "scale = 1 / std::sqrt(float(head_dim))"),
        "scale = FAULT ? 1 : 1 / std::sqrt(float(head_dim))",
    ),
    "the other half of a lane": (
        *("cached in bfloat16", "cache_products.h", "pairs & int32_t(0xffff0000)"),
        "pairs << 16 * FAULT & int32_t(0xffff0000)",
    ),
    "a mean of other tokens": (
        *("hourglass", "step.cpp", "into[i] /= model.hourglass.factor"),
        "into[i] /= model.hourglass.factor - FAULT",
    ),
    "the hash of another order": ("tables", "ngrams.h", "n = tables.orders[i]", "n = tables.orders[FAULT ? 0 : i]"),
}
"""Faults in native code: the model that shows each, the source, its text, and the text with the fault, in which FAULT
is 1 while the fault is switched on and 0 otherwise."""


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """A library with all faults, each of which `fault` switches on by its index."""
    folder = tmp_path_factory.mktemp("faulty")
    engine = {path.name: path for path in step.CODE.iterdir() if path.suffix in (".h", ".cpp")}
    kinds = {name: path for kind in native_kinds().values() for name, path in kind.headers.items()}
    texts = {name: path.read_text() for name, path in {**engine, **kinds}.items()}
    for number, (_, name, right, wrong) in enumerate(FAULTS.values()):
        assert texts[name].count(right) == 1, right
        texts[name] = texts[name].replace(right, wrong.replace("FAULT", f"(fault == {number})"))
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
