"""The step by native code against the same model by torch, in float32 and float64."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from attention.cases import every_form
from grids import every_nth, thinned
from machine import needs_native, on_other_processors
from model.test_laws import VOCABULARY, build, text
from models import LIKE_LLAMA, stirred
from torch import Tensor
from torch.testing import assert_close

from lmlong.attention.base import state_tensors
from lmlong.attention.registry import CAUSAL
from lmlong.attention.softmax import state as softmax
from lmlong.attention.window.layer import WindowState
from lmlong.decode import native
from lmlong.decode.choice import fast_engine, why_no_fast_engine
from lmlong.decode.engine import step
from lmlong.model.base import quantize
from lmlong.model.language_model import LanguageModel
from lmlong.model.state import concat_states, rebuild_state, state_row
from lmlong.native import build as build_of_library
from lmlong.recipe import Attention, Downsample, Favor, Mixer, Model, NgramEmbedding, Rope

pytestmark = needs_native

LINEAR = Attention(kind="linear")
MIXED = Attention(kind=["linear", "window", "delta"], window=5)
SINK = Attention(kind=["window", "linear"], window=6, window_sink=True)
SOFTMAX = Attention(kind="softmax")
GROWING = Attention(kind=["linear", "softmax"])
TABLES = NgramEmbedding(orders=[3, 1, 2], rows=50, width=5)
BESIDE = Attention(kind=["linear", "delta"], parallel_window=5)
OWN_HEADS: dict[str, Any] = {
    "layers": 4,
    "attention": Attention(kind=["delta", "softmax", "ngram", "window"], window=5),
    "mixers": [
        Mixer(kind="delta", heads=4, head_dim=6, value_dim=10, convolution=3),
        Mixer(kind="softmax", heads=6, kv_heads=2, head_dim=12, convolution=0, output_gate=False),
        Mixer(kind="ngram", heads=4, value_dim=7),
        Mixer(kind="window", head_dim=4, rope=Rope(base=100.0), head_norm=False),
    ],
}
SHAPES: list[dict[str, Any]] = [
    {},
    {"positions": "rotary"},
    {"convolution": 0},
    {"convolution": 1},
    {"width": 40, "heads": 5, "mlp_ratio": 2.0},  # all products have ends that fill no vector
    {"width": 24, "heads": 3, "head_dim": 16, "value_dim": 5, "attention": MIXED},
    {"width": 35, "heads": 5, "positions": "none", "convolution": 64},
    {"heads": 4, "attention": MIXED, **LIKE_LLAMA, "head_norm": True},
    {"heads": 4, **LIKE_LLAMA},
    {"heads": 1, "attention": Attention(kind="linear", feature_map="favor", favor=Favor(features=7))},
    {"attention": MIXED},
    {"attention": BESIDE},
    {"attention": BESIDE, "positions": "rotary", "heads": 4, "kv_heads": 2},
    {"attention": BESIDE, "positions": "none", "value_dim": 3},
    {"attention": Attention(kind="delta", parallel_window=5, window_sink=True), "heads": 4, "kv_heads": 2},
    {"attention": SINK},
    {"attention": Attention(kind="window", window=1, window_sink=True), "heads": 4, "kv_heads": 1},
    {"layers": 4, "attention": BESIDE, "downsample": Downsample(factor=2)},
    {"attention": SOFTMAX, "positions": "none"},
    {"heads": 4, "attention": SOFTMAX, **LIKE_LLAMA},
    {"width": 24, "heads": 6, "head_dim": 16, "value_dim": 5, "kv_heads": 2, "attention": SOFTMAX},
    {
        "width": 512,
        "heads": 2,
        "attention": Attention(kind="linear", feature_map="favor"),
    },  # exponents that must be held down
    *({"layers": 3, "downsample": Downsample(factor=3, kind=kind)} for kind in ("mean", "max", "conv")),
    {"layers": 4, "attention": MIXED, "downsample": Downsample(factor=2)},
    {"layers": 4, "attention": GROWING, "downsample": Downsample(factor=2)},
    {"attention": Attention(kind=["ngram", "linear"]), "ngram_embedding": TABLES},
    {"layers": 3, "downsample": Downsample(factor=2), "ngram_embedding": NgramEmbedding(orders=[4], rows=9, width=70)},
    {"layers": 3, "attention": MIXED, "add_ngram": [1, 3]},
    {"heads": 4, "attention": SOFTMAX, **LIKE_LLAMA, "add_ngram": [1]},
    OWN_HEADS,
]
WIDTHS: list[dict[str, Any]] = [
    {"heads": 9, "kv_heads": 3, "head_dim": 48, "attention": SOFTMAX},
    {"heads": 8, "kv_heads": 1, "head_dim": 24, "value_dim": 37, "attention": SOFTMAX},
    {"heads": 4, "kv_heads": 2, "head_dim": 10, "value_dim": 72, "attention": SOFTMAX, "convolution": 0},
    {"heads": 1, "head_dim": 64, "attention": SOFTMAX},
    {"heads": 4, "kv_heads": 2, "head_dim": 16, "attention": MIXED, "layers": 3},
    {"heads": 2, "attention": BESIDE},
    {"heads": 9, "kv_heads": 3, "head_dim": 16, "value_dim": 10, "attention": SINK},
]
"""Caches whose vectors are filled or not, of one to eight query heads for each key."""
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
KEPT = pytest.mark.parametrize("kept", ["32", "bf16", "int8", "int4"])


def shaped(shape: dict[str, Any], kept: str = "32") -> LanguageModel:
    torch.manual_seed(0)  # of random features
    model = stirred(
        LanguageModel(Model(**{"width": 16, "layers": 2, "heads": 2, "attention": LINEAR, **shape}), VOCABULARY), 0.5
    ).eval()
    if kept != "32":
        quantize(model, kept)
    return model


def compiled(model: LanguageModel) -> LanguageModel:
    why = why_no_fast_engine(model)
    assert why is None, why
    other = copy.deepcopy(model)
    other.engine = fast_engine(other, tried=False)  # test_fail_closed.py has the trials
    return other


@torch.inference_mode()
def written(model: LanguageModel, tokens: Tensor, state: Any = None) -> Tensor:
    """All logits and, in the end, all numbers of the state, after `tokens` (B, T) one by one."""
    state = model.init_state(len(tokens)) if state is None else state
    logits = []
    for token in tokens.mT:
        found, state = step(model, token, state)
        logits.append(found)
    return torch.cat([x.double().flatten() for x in (*logits, *state_tensors(state))])


def assert_as_exact_as_torch(model: LanguageModel, tokens: Tensor) -> None:
    exact = written(copy.deepcopy(model).double(), tokens)
    by_torch, native = (float((written(which, tokens) - exact).norm()) for which in (model, compiled(model)))
    assert native <= 4 * by_torch and native < 1e-4 * float(exact.norm())


def assert_near_torch(model: LanguageModel, tokens: Tensor) -> None:
    """Compare a model whose activations are rounded to int8: float32's rounding moves a few to the next integer."""
    exact = written(copy.deepcopy(model).double(), tokens)
    assert float((written(compiled(model), tokens) - exact).norm()) < 0.02 * float(exact.norm())


def assert_steps_like_torch(model: LanguageModel, state: Any, tokens: Tensor) -> None:
    """Compare each step, from a state on, with that of torch from the same state."""
    native = compiled(model)
    for token in tokens.mT:
        expected, after = model.step(token, state)
        logits, state = step(native, token, state)
        for x, expected_x in zip((logits, *state_tensors(state)), (expected, *state_tensors(after)), strict=True):
            assert_close(x, expected_x, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "shape",
    [
        {"layers": 3, "attention": MIXED},
        {"layers": 4, "attention": BESIDE, "downsample": Downsample(factor=2)},
        {"layers": 4, "attention": GROWING, "downsample": Downsample(factor=2)},
        {"attention": Attention(kind="ngram")},
    ],
    ids=str,
)
def test_a_state_may_be_laid_out_in_any_way(shape: dict[str, Any]) -> None:
    """In memory it may be transposed, or have other numbers between its own."""
    model = compiled(shaped(shape))
    draw = torch.Generator().manual_seed(0)
    first, more = (torch.randint(VOCABULARY, (2, time), generator=draw) for time in (9, 5))
    with torch.inference_mode():
        state = model(first)[1]
        expected = written(model, more, state)
        for change in (
            lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
            lambda x: torch.stack([x, x], dim=-1)[..., 1],
        ):
            other = rebuild_state(state, iter([change(x) for x in state_tensors(state)]))
            assert torch.equal(written(model, more, other), expected)


def test_these_have_native_code() -> None:
    """So that none of them is skipped below."""
    maps = ("elu", "relu", "cosine", "softmax", "hedgehog", "taylor", "favor")
    known = [Attention(kind="linear", feature_map=feature_map) for feature_map in maps]  # type: ignore[arg-type]
    known += [Attention(kind=kind) for kind in CAUSAL if kind != "linear"]
    assert [why_no_fast_engine(shaped({"attention": attention})) for attention in known] == [None] * len(known)


@every_nth(4, every_form)
def test_native_steps_of_every_attention_are_as_exact_as_torch(form: Attention) -> None:
    assert_as_exact_as_torch(build(form, torch.float32), text(time=40)[0])


@pytest.mark.parametrize("shape", [*SHAPES, *WIDTHS], ids=str)
def test_native_steps_of_every_shape_are_as_exact_as_torch(shape: dict[str, Any]) -> None:
    assert_as_exact_as_torch(shaped(shape), text(batch=3, time=24)[0])


@KEPT
@pytest.mark.parametrize("sums", [torch.float32, torch.float64], ids=str)
def test_native_steps_in_every_weight_format_are_as_exact_as_torch(kept: str, sums: torch.dtype) -> None:
    model = shaped({"width": 72, "heads": 3}, kept)  # vectors of bytes are filled, and something is left
    model.set_state_dtype(sums)
    tokens = text(time=40)[0]
    check = assert_near_torch if kept in ("int8", "int4") else assert_as_exact_as_torch
    check(model, tokens)
    with torch.inference_mode():
        _, state = step(compiled(model), tokens[:, 0], model.init_state(2))
    assert state.blocks[0].attention.S.dtype == sums


@pytest.mark.parametrize("decay", ["learned", "channel"])
def test_long_memories_are_as_exact_as_by_torch(decay: Any) -> None:
    """A rounding of a gate is one of every later token."""
    model = shaped({"attention": Attention(kind="linear", decay=decay)})
    for block in model.blocks:
        torch.nn.init.constant_(block.mixer.forget_gate.bias, 9.0)  # 8,000 tokens
        torch.nn.init.normal_(block.mixer.forget_gate.weight, std=0.01)
    assert_as_exact_as_torch(model, text(batch=1, time=600)[0])


@pytest.mark.parametrize("decay", ["fixed", "channel"])
@torch.inference_mode()
def test_float64_sums_keep_their_digits_through_a_gate(decay: Any) -> None:
    model = shaped({"attention": Attention(kind="linear", decay=decay)})
    if decay == "channel":
        for block in model.blocks:
            torch.nn.init.constant_(block.mixer.forget_gate.bias, 12.0)  # what is forgotten is less than float32 tells
    model.set_state_dtype(torch.float64)
    state = model.init_state(1)
    for x in state.blocks[0].attention:
        x.normal_().mul_(2**25)
    found, expected = (
        step(which, torch.tensor([1]), state)[1].blocks[0].attention.S for which in (compiled(model), model)
    )
    assert_close(found, expected, rtol=1e-10, atol=1e-6)


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if "softmax" in str(shape)], ids=str)
def test_keys_are_settled_in_blocks_as_by_torch(shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(softmax, "BLOCK", 4)
    model, tokens = shaped(shape), text(batch=3, time=40)[0]
    assert_as_exact_as_torch(model, tokens)
    with torch.inference_mode():
        assert_steps_like_torch(model, model(tokens[:, :5])[1], tokens[:, 5:])


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if {"downsample", "ngram_embedding"} & {*shape}], ids=str)
@torch.inference_mode()
def test_a_new_document_starts_from_an_empty_state(shape: dict[str, Any]) -> None:
    """The states of layers that read whole blocks are those of the last document until a block of the new one is
    full, and the last tokens are still those of the last document."""
    model = shaped(shape)
    factor = model.hourglass.factor if model.hourglass else 2
    tokens = text(batch=factor + 2, time=20)[0]
    starts = torch.zeros_like(tokens, dtype=torch.bool)
    for row in range(len(tokens)):
        starts[row, 19 - row] = True
    assert_steps_like_torch(model, model(tokens, None, starts)[1], tokens[:, : 2 * factor])


@thinned(every_shape, KEPT)
@torch.inference_mode()
def test_a_row_has_the_same_bits_in_any_batch_and_with_any_number_of_threads(shape: dict[str, Any], kept: str) -> None:
    """Rows that have read texts of different lengths, so that blocks end at different tokens."""
    assert_same_to_the_bit(compiled(shaped(shape, kept)))


def assert_same_to_the_bit(model: LanguageModel) -> None:
    tokens = text(batch=4, time=9)[0]
    rows = [model(row[None, :length])[1] for row, length in zip(tokens, (1, 2, 5, 9), strict=True)]
    together = concat_states(rows)
    usual = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            logits, state = step(model, tokens[:, 0], together)
            for row, before in enumerate(rows):
                alone, after = step(model, tokens[row, :1], before)
                assert torch.equal(alone[0], logits[row])
                pair = model.settle(after), model.settle(state_row(state, row))
                assert all(map(torch.equal, *map(state_tensors, pair)))
    finally:
        torch.set_num_threads(usual)


@torch.inference_mode()
def test_native_steps_read_states_of_every_dtype() -> None:
    """As they come from reading under autocast, or from a model in float64. A cache in bfloat16 stays one."""
    model = shaped({"attention": MIXED, "layers": 4, "downsample": Downsample(factor=2)})
    _, state = model(text(batch=2, time=9)[0])
    token = torch.tensor([3, 4])
    for dtype in (torch.bfloat16, torch.float64):
        kept = [x if x.dtype in (torch.bool, torch.long) else x.to(dtype) for x in state_tensors(state)]
        cached = {id(x) for block in rebuild_state(state, iter(kept)).blocks for x in keys_and_values(block.attention)}
        whole = [x.float() if x.is_floating_point() and id(x) not in cached else x for x in kept]
        found, _ = step(compiled(model), token.int(), rebuild_state(state, iter(kept)))
        expected, _ = step(compiled(model), token, rebuild_state(state, iter(whole)))
        assert_close(found, expected, rtol=1e-5, atol=1e-5)


def keys_and_values(attention: Any) -> tuple[Tensor, ...]:
    """Return the keys and values that the state of a layer caches."""
    return attention[:2] if isinstance(attention, WindowState) else ()


@pytest.mark.parametrize("shape", WIDTHS, ids=str)
@torch.inference_mode()
def test_a_cache_in_bfloat16_is_read_as_exactly_as_by_torch(shape: dict[str, Any]) -> None:
    """Rarely, a key that both compute is rounded up by one and down by the other: most steps have none."""
    model, tokens = shaped(shape), text(batch=2, time=300)[0]
    model.set_cache_dtype(torch.bfloat16)
    native = compiled(model)
    _, state = model(tokens[:, :270])
    errors = []
    for token in tokens.mT[270:]:
        expected, after = model.step(token, state)
        logits, state = step(native, token, state)
        assert [x.dtype for x in state_tensors(state)] == [x.dtype for x in state_tensors(after)]
        pairs = zip((logits, *state_tensors(state)), (expected, *state_tensors(after)), strict=True)
        errors.append(max(float((x.float() - y.float()).abs().max() / y.float().abs().max()) for x, y in pairs))
    assert torch.bfloat16 in {x.dtype for x in state_tensors(state)}
    assert sorted(errors)[len(errors) // 2] < 1e-5 and max(errors) < 2**-6


@torch.inference_mode()
def test_nan_stays_nan() -> None:
    for feature_map in ("elu", "relu", "cosine", "softmax", "hedgehog", "taylor", "favor"):
        model = shaped({"attention": Attention(kind="linear", feature_map=feature_map)})  # type: ignore[arg-type]
        model.embedding.weight[3] = torch.nan
        model = compiled(model)
        state = step(model, torch.tensor([3]), model.init_state(1))[1]
        logits, _ = step(model, torch.tensor([4]), state)
        assert logits.isnan().all(), feature_map


@every_nth(5, on_other_processors)
def test_processors_with_other_instructions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: list[str]) -> None:
    monkeypatch.setenv("LMLONG_CACHE", str(tmp_path))
    others = [flag.replace("-O3", "-O1") for flag in build_of_library.FLAGS if flag != "-march=native"]  # sooner
    monkeypatch.setattr(build_of_library, "FLAGS", (*others, *flags))
    library = native.library.__wrapped__()
    monkeypatch.setattr(native, "library", lambda: library)
    for kept in ("32", "bf16", "int8", "int4"):
        check = assert_near_torch if kept in ("int8", "int4") else assert_as_exact_as_torch
        check(shaped({"attention": MIXED, "width": 40, "heads": 2}, kept), text(time=20)[0])
    assert len(list(tmp_path.glob("native/*/code.so"))) == 1
