"""The step by native code against the same model by torch, in float32 and float64."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from attention.cases import every_form
from grids import every_nth
from machine import needs_native, on_other_processors
from model.shapes import KEPT, MIXED, SHAPES, WIDTHS, compiled, every_shape, shaped
from models import predict, text
from torch import Tensor
from torch.testing import assert_close

from lmlong.attention.base import state_tensors
from lmlong.attention.registry import CAUSAL
from lmlong.attention.softmax import state as softmax
from lmlong.attention.window.layer import WindowState
from lmlong.decode import native
from lmlong.decode.choice import why_no_fast_engine
from lmlong.decode.engine import step
from lmlong.model.language_model import LanguageModel
from lmlong.model.state import rebuild_state
from lmlong.native import build as build_of_library
from lmlong.recipe import Attention, Downsample

pytestmark = needs_native


@torch.inference_mode()
def written(model: LanguageModel, tokens: Tensor, state: Any = None) -> Tensor:
    """All logits and, in the end, all numbers of the state, after `tokens` (B, T) one by one. Of a state that grows,
    which may hold the same in different ways, the logits of tokens that are read at once."""
    state = model.init_state(len(tokens)) if state is None else state
    found = []
    for token in tokens.mT:
        logits, state = step(model, token, state)
        found.append(logits)
    found += state_tensors(state) if model.constant_state else [predict(model, tokens[:, :6], state)[0]]
    return torch.cat([x.double().flatten() for x in found])


def after_a_prompt(model: LanguageModel, tokens: Tensor) -> Tensor:
    """The same, where the first 20 tokens are read at once. In them a document starts, in each row another one of the
    last tokens: the states of layers that read whole blocks are those of the document before, until a block of the new
    one is full."""
    starts = torch.zeros(len(tokens), 20, dtype=torch.bool)
    for row in range(len(tokens)):
        starts[row, 19 - row] = True
    with torch.inference_mode():
        _, state = model(tokens[:, :20], None, starts)
    return written(model, tokens[:, 20:], state)


def assert_as_exact_as_torch(model: LanguageModel, tokens: Tensor, write: Any = written) -> None:
    exact = write(copy.deepcopy(model).double(), tokens)
    by_torch, native = (float((write(which, tokens) - exact).norm()) for which in (model, compiled(model)))
    assert native <= 4 * by_torch and native < 1e-4 * float(exact.norm())


def assert_near_torch(model: LanguageModel, tokens: Tensor) -> None:
    """Compare a model whose activations are rounded to int8: float32's rounding moves a few to the next integer."""
    exact = written(copy.deepcopy(model).double(), tokens)
    assert float((written(compiled(model), tokens) - exact).norm()) < 0.02 * float(exact.norm())


@pytest.mark.parametrize("shape", ["few channels of values", "growing hourglass", "hourglass and tables", "ngram"])
def test_a_state_may_be_laid_out_in_any_way(shape: str) -> None:
    """In memory it may be transposed, or have other numbers between its own."""
    model = compiled(shaped(SHAPES[shape]))
    first, more = text(2, 14).split([9, 5], dim=1)
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


@every_nth(8, every_form)
def test_native_steps_of_every_attention_are_as_exact_as_torch(form: Attention) -> None:
    assert_as_exact_as_torch(shaped({"attention": form}, deviation=1.0), text(2, 40))


@every_shape
def test_native_steps_of_every_shape_are_as_exact_as_torch(
    shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(softmax, "BLOCK", 4)  # keys are settled in many blocks
    deviation = 0.3 if shape is SHAPES["hyperbolic"] else 0.5  # whose exponentials amplify rounding
    assert_as_exact_as_torch(shaped(shape, deviation=deviation), text(5, 36), after_a_prompt)


@KEPT
@pytest.mark.parametrize("sums", [torch.float32, torch.float64], ids=str)
def test_native_steps_in_every_weight_format_are_as_exact_as_torch(kept: str, sums: torch.dtype) -> None:
    model = shaped({"width": 72, "heads": 3}, kept)  # vectors of bytes are filled, and something is left
    model.set_state_dtype(sums)
    tokens = text(2, 40)
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
    assert_as_exact_as_torch(model, text(1, 600))


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


@torch.inference_mode()
def test_native_steps_read_states_of_every_dtype() -> None:
    """As they come from reading under autocast, or from a model in float64. A cache in bfloat16 stays one."""
    model = shaped({"attention": MIXED, "layers": 4, "downsample": Downsample(factor=2)})
    _, state = model(text(2, 9))
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


@pytest.mark.parametrize("shape", WIDTHS)
@torch.inference_mode()
def test_a_cache_in_bfloat16_is_read_as_exactly_as_by_torch(shape: str) -> None:
    """Rarely, a key that both compute is rounded up by one and down by the other: most steps have none."""
    model, tokens = shaped(WIDTHS[shape]), text(2, 300)
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
    others = [flag.replace("-O3", "-O0") for flag in build_of_library.FLAGS if flag != "-march=native"]  # sooner
    monkeypatch.setattr(build_of_library, "FLAGS", (*others, *flags))
    library = native.library.__wrapped__()
    monkeypatch.setattr(native, "library", lambda: library)
    for kept in ("32", "bf16", "int8", "int4"):
        check = assert_near_torch if kept in ("int8", "int4") else assert_as_exact_as_torch
        check(shaped({"attention": MIXED, "width": 40, "heads": 2}, kept), text(2, 20))
    assert len(list(tmp_path.glob("native/*/code.so"))) == 1
