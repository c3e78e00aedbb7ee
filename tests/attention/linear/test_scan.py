"""The scan of many tokens and its own backward pass, against the recurrence and plain autograd."""

from collections.abc import Iterator

import pytest
import torch
from attention.cases import HEAD_DIM, HEADS, VALUE_DIM, assert_same_gradients, build, inputs
from attention.scans import Identity, ScanInputs, linear_scan
from grids import thinned
from machine import needs_compiler
from torch import Tensor

from lmlong import recipe
from lmlong.attention import chunks, laws
from lmlong.attention import scan as spans
from lmlong.attention.chunks import CHUNK_SIZE
from lmlong.attention.linear.naive import LinearState, quadratic, recurrent_step
from lmlong.attention.linear.native import NativeLinear
from lmlong.model.language_model import LanguageModel


@pytest.fixture
def short_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two chunks to a span, so that short texts have borders of both kinds."""
    monkeypatch.setattr(spans, "SPAN", 2 * CHUNK_SIZE)


DECAYS: dict[str, tuple[int, ...] | None] = {"kept": None, "decaying": (), "by-channel": (HEAD_DIM,)}
"""The shape of the log decays of a token."""


def case(
    time: int, starts: list[int] | None, draw: torch.Generator, decay: tuple[int, ...] | None = ()
) -> dict[str, Tensor | None]:
    """Random features, values, gates and a state that has read something, in float64."""

    def positive(*shape: int) -> Tensor:
        return (torch.rand(*shape, generator=draw, dtype=torch.float64) + 0.01).requires_grad_()

    begun = None
    if starts is not None:
        begun = torch.zeros(2, time, dtype=torch.bool)
        begun[0, [place for place in starts if place < time]] = True  # the other row has none
    return {
        "fq": positive(2, HEADS, time, HEAD_DIM),
        "fk": positive(2, HEADS, time, HEAD_DIM),
        "v": torch.randn(2, HEADS, time, VALUE_DIM, generator=draw, dtype=torch.float64).requires_grad_(),
        "S": torch.randn(2, HEADS, HEAD_DIM, VALUE_DIM, generator=draw, dtype=torch.float64).requires_grad_(),
        "z": positive(2, HEADS, HEAD_DIM),
        "starts": begun,
        "log_decay": None if decay is None else (-3 * positive(2, HEADS, time, *decay).detach() ** 4).requires_grad_(),
    }


def scanned(x: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    inputs = ScanInputs(x["fq"], x["fk"], x["v"], x["starts"], x["log_decay"])
    return linear_scan(NativeLinear(), Identity(), inputs, x["S"], x["z"])


def folded(x: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The recurrence itself."""
    state, outputs = LinearState(x["S"], x["z"]), []
    for t in range(x["fq"].shape[2]):
        now = slice(t, t + 1)
        starts = None if x["starts"] is None else x["starts"][:, now]
        decay = None if x["log_decay"] is None else x["log_decay"][:, :, now]
        y, state = recurrent_step(x["fq"][:, :, now], x["fk"][:, :, now], x["v"][:, :, now], state, starts, decay)
        outputs.append(y)
    return torch.cat(outputs, dim=2), *state


@thinned(
    pytest.mark.parametrize("time", [1, 5, 63, 64, 129, 257]),
    pytest.mark.parametrize("starts", [None, [0], [64, 128, 256], [3, 4, 63, 65, 129, 255]], ids=str),
)
@pytest.mark.parametrize("decay", DECAYS.values(), ids=DECAYS)
def test_all_gradients_are_those_of_the_recurrence(
    short_spans: None, time: int, starts: list[int] | None, decay: tuple[int, ...] | None
) -> None:
    draw = torch.Generator().manual_seed(time)
    x = case(time, starts, draw, decay)
    assert_same_gradients(x, scanned(x), folded(x), draw)  # type: ignore[arg-type]


@pytest.mark.parametrize("starts", [None, [2, 3, 4]], ids=str)
@pytest.mark.parametrize("decay", [(), (HEAD_DIM,)], ids=["by-head", "by-channel"])
def test_gradients_by_differences(
    monkeypatch: pytest.MonkeyPatch, starts: list[int] | None, decay: tuple[int, ...]
) -> None:
    monkeypatch.setattr(chunks, "CHUNK_SIZE", 4)
    monkeypatch.setattr(spans, "SPAN", 8)
    x = case(13, starts, torch.Generator().manual_seed(0), decay)
    names = [name for name, t in x.items() if t is not None and t.requires_grad]

    def function(*leaves: Tensor) -> tuple[Tensor, ...]:
        return scanned({**x, **dict(zip(names, leaves, strict=True))})  # type: ignore[arg-type]

    assert torch.autograd.gradcheck(function, [x[name] for name in names], fast_mode=True)


def test_without_a_state_it_is_the_definition(short_spans: None) -> None:
    x = case(300, [64, 100], torch.Generator().manual_seed(0))
    fq, fk, v, starts, log_decay = (x[name] for name in ("fq", "fk", "v", "starts", "log_decay"))
    assert fq is not None and fk is not None and v is not None
    empty = LinearState(
        torch.zeros(2, HEADS, HEAD_DIM, VALUE_DIM, dtype=v.dtype), torch.zeros(2, HEADS, HEAD_DIM, dtype=v.dtype)
    )
    y, *_ = linear_scan(NativeLinear(), Identity(), ScanInputs(fq, fk, v, starts, log_decay), *empty)
    assert laws.error(y, quadratic(fq, fk, v, starts, log_decay)) < 1e-12


@pytest.mark.parametrize("name", ["hedgehog", "taylor", "favor"])
def test_the_weights_of_feature_maps_learn(short_spans: None, name: str) -> None:
    attention = build(recipe.Attention(kind="linear", feature_map=name, decay="none")).double()
    q, k, v, starts = inputs(attention, 300, torch.float64)
    weights = list(attention.parameters())
    assert weights
    measured = attention(q, k, v, attention.init_state(2, v.device, v.dtype), starts)[0]
    truth = attention.reference(q, k, v, starts)
    upstream = torch.randn(v.shape, generator=torch.Generator().manual_seed(1), dtype=v.dtype)
    for mine, exact in zip(*(torch.autograd.grad(y, weights, upstream) for y in (measured, truth)), strict=True):
        assert laws.error(mine, exact) < 1e-10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_more_is_kept_than_was_declared(dtype: torch.dtype) -> None:
    """Queries, keys and values before their map, outputs, gates, starts, denominators, and a state for each span."""
    time = 3 * spans.SPAN + 1
    attention = build(recipe.Attention(kind="linear", feature_map="elu", decay="learned"))
    q, k, v, starts, log_decay = inputs(attention, time, dtype)
    assert log_decay is not None and starts is not None
    real = [x.requires_grad_() for x in (q, k, v, log_decay)]
    kept: dict[int, int] = {}

    def count(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
        y, state = attention(q, k, v, attention.init_state(2, v.device, v.dtype), starts, {"log_decay": log_decay})
    states = 4 * (state.S.nbytes + state.z.nbytes)
    assert sum(kept.values()) == sum(x.nbytes for x in (*real, starts, y)) + 4 * log_decay.numel() + states


def test_nothing_is_kept_without_gradients() -> None:
    attention = build(recipe.Attention(kind="linear"))
    q, k, v, starts, log_decay = inputs(attention, 600, torch.float32)
    q.requires_grad_()
    kept: list[Tensor] = []
    with torch.no_grad(), torch.autograd.graph.saved_tensors_hooks(kept.append, lambda x: x):
        y, _ = attention(q, k, v, attention.init_state(2, v.device, v.dtype), starts, {"log_decay": log_decay})
    assert not kept and not y.requires_grad


def test_a_backward_pass_under_autocast_is_the_same() -> None:
    attention = build(recipe.Attention(kind="linear"))
    q, k, v, starts, log_decay = inputs(attention, 200, torch.bfloat16)
    leaves = [x.requires_grad_() for x in (q, k, v, log_decay) if x is not None]

    def gradients() -> Iterator[Tensor]:
        y, state = attention(q, k, v, attention.init_state(2, v.device, v.dtype), starts, {"log_decay": log_decay})
        yield from torch.autograd.grad(y.float().sum() + state.S.sum(), leaves)

    plain = list(gradients())
    with torch.autocast("cpu", torch.bfloat16):
        assert all(map(torch.equal, gradients(), plain))


@needs_compiler
def test_a_compiled_read_is_the_same() -> None:
    torch.manual_seed(0)
    model = LanguageModel(recipe.Model(width=16, layers=2, heads=2, attention=recipe.Attention(kind="linear")), 50)
    tokens = torch.randint(50, (1, 90))
    upstream = torch.randn(1, 90, 16)
    plain = model.hidden_states(tokens)[0]
    model.compile_blocks()
    compiled = model.hidden_states(tokens)[0]
    assert laws.error(compiled, plain) < 1e-5
    weights = list(model.parameters())
    for mine, truth in zip(*(torch.autograd.grad(y, weights, upstream) for y in (compiled, plain)), strict=True):
        assert laws.error(mine, truth) < 1e-4
