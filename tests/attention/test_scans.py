"""The scans of linear attention and the delta rule, by native code and torch, against their recurrences."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import pytest
import torch
from attention.cases import HEADS, build
from attention.scans import (
    VALUES,
    WIDTH,
    Identity,
    ScanInputs,
    delta_scan,
    in_dtype,
    linear_scan,
    outputs_and_gradients,
    scan_inputs,
)
from grids import thinned
from machine import needs_native
from torch import Tensor

from lmlong import recipe
from lmlong.attention import chunks, laws
from lmlong.attention import scan as spans
from lmlong.attention.delta.chunk import ChunkKernel as DeltaChunks
from lmlong.attention.delta.layer import DeltaAttention
from lmlong.attention.delta.naive import DeltaState, Silu, UnitFeatures, recurrent
from lmlong.attention.delta.native import NativeDelta
from lmlong.attention.device_policy import GPU_POLICY
from lmlong.attention.feature_map_registry import FEATURE_MAPS
from lmlong.attention.feature_maps import Cosine, Elu, FeatureMap, Relu
from lmlong.attention.inputs import MIN_LOG_DECAY
from lmlong.attention.linear.chunk import ChunkKernel as LinearChunks
from lmlong.attention.linear.layer import LinearAttention
from lmlong.attention.linear.naive import LinearState, recurrent_step
from lmlong.attention.linear.native import NativeLinear
from lmlong.attention.ngram.sort import SortKernel
from lmlong.attention.scan import Kernel
from lmlong.errors import UsageError
from lmlong.testing import random_text

EXACT = {torch.float32: 2e-5, torch.bfloat16: 4e-2}


def linear_recurrence(features: FeatureMap, x: ScanInputs, S: Tensor, z: Tensor) -> Sequence[Tensor]:
    fq, fk = features.query(x.q), features.key(x.k)
    state, outputs = LinearState(S, z), []
    for t in range(x.q.shape[2]):
        now = slice(t, t + 1)
        starts = None if x.document_starts is None else x.document_starts[:, now]
        log_decay = None if x.log_decay is None else x.log_decay[:, :, now]
        y, state = recurrent_step(fq[:, :, now], fk[:, :, now], x.v[:, :, now], state, starts, log_decay)
        outputs.append(y)
    return torch.cat(outputs, dim=2), *state


def delta_recurrence(features: FeatureMap, x: ScanInputs, S: Tensor) -> Sequence[Tensor]:
    fq, fk = features.query(x.q), features.key(x.k)
    assert x.beta is not None
    y, state = recurrent(fq, fk, x.v, x.beta, DeltaState(S), x.document_starts, x.log_decay)
    return y, *state


class Rule(NamedTuple):
    """How a recurrence is computed, and its features of WIDTH."""

    scan: Callable[..., Sequence[Tensor]]
    recurrence: Callable[..., Sequence[Tensor]]
    native: Kernel
    torch: Kernel
    features: FeatureMap

    def by(self, engine: str) -> Callable[..., Sequence[Tensor]]:
        """Return the scan by native code or torch, or by torch in the form for GPUs."""
        if engine == "torch for GPUs":
            return partial(self.scan, self.torch, policy=GPU_POLICY)
        return partial(self.scan, getattr(self, engine))

    def state(self, features: int = WIDTH) -> list[Tensor]:
        draw = torch.Generator().manual_seed(1)
        shapes = [(2, HEADS, features, VALUES), (2, HEADS, features)][: 2 if self is LINEAR else 1]
        return [torch.rand(shape, generator=draw, dtype=torch.float64) for shape in shapes]


LINEAR = Rule(linear_scan, linear_recurrence, NativeLinear(), LinearChunks(), Elu(WIDTH))
DELTA = Rule(delta_scan, delta_recurrence, NativeDelta(), DeltaChunks(), UnitFeatures(Silu(WIDTH)))

every_rule = pytest.mark.parametrize("rule", [LINEAR, DELTA], ids=["linear", "delta"])
DECAYS = [
    pytest.param(LINEAR, None, id="linear"),
    pytest.param(LINEAR, (), id="linear-decay"),
    pytest.param(LINEAR, (WIDTH,), id="linear-by-channel"),
    pytest.param(DELTA, None, id="delta"),
    pytest.param(DELTA, (), id="delta-decay"),
]
every_decay = pytest.mark.parametrize(("rule", "decay"), DECAYS)
ENGINES = "native", "torch", "torch for GPUs"
every_engine = pytest.mark.parametrize("engine", ENGINES)
each_type = pytest.mark.parametrize("dtype", EXACT, ids=str)


def assert_exact(
    rule: Rule, engine: str, x: ScanInputs, dtype: torch.dtype = torch.float32, features: FeatureMap | None = None
) -> None:
    """The results in a dtype are those of torch in float64."""
    features = features or rule.features
    state = rule.state(features.key(x.k.float()).shape[-1])
    measured = outputs_and_gradients(rule.by(engine), features, x, state, dtype)
    exact = outputs_and_gradients(rule.by("torch"), features.double(), x, state, torch.float64)
    features.float()
    for name, result in measured.items():
        assert result.isfinite().all() and laws.error(result, exact[name]) < EXACT[dtype], name


@torch.no_grad()
def results(x: ScanInputs, dtype: torch.dtype = torch.float32, engine: str = "native") -> Sequence[Tensor]:
    """Return outputs, S and z of linear attention."""
    state = (t.to(torch.promote_types(dtype, torch.float32)) for t in LINEAR.state())
    return LINEAR.by(engine)(LINEAR.features, in_dtype(x, dtype), *state)


@pytest.fixture
def short_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two chunks to a span, so that short texts have borders of both kinds."""
    monkeypatch.setattr(spans, "SPAN", 2 * chunks.CHUNK_SIZE)


@thinned(
    pytest.mark.parametrize("time", [1, 5, 63, 64, 129, 257, 700]),
    pytest.mark.parametrize("starts", [None, [0], [64, 128, 256, 384], [3, 4, 63, 65, 129, 255, 511, 641]], ids=str),
    pytest.mark.parametrize("engine", ENGINES[1:]),
    every_decay,
)
def test_chunks_in_float64_equal_the_recurrence(
    short_spans: None, time: int, starts: list[int] | None, engine: str, rule: Rule, decay: tuple[int, ...] | None
) -> None:
    x = scan_inputs(time, starts, decay)
    measured, exact = (
        outputs_and_gradients(scan, rule.features, x, rule.state(), torch.float64)
        for scan in (rule.by(engine), rule.recurrence)
    )
    for name, result in measured.items():
        assert (result - exact[name]).norm() < 1e-11 * (exact[name].norm() + 1), name


@every_decay
def test_spans_on_a_gpu_equal_one_span(short_spans: None, rule: Rule, decay: tuple[int, ...] | None) -> None:
    x = scan_inputs(700, [3, 128, 511], decay)
    shortest = GPU_POLICY._replace(span_bytes=1)
    spans_of_two_chunks, whole = (
        outputs_and_gradients(partial(rule.by("torch"), policy=policy), rule.features, x, rule.state(), torch.float64)
        for policy in (shortest, GPU_POLICY)
    )
    for name, result in spans_of_two_chunks.items():
        assert laws.error(result, whole[name]) < 1e-11, name


@thinned(
    pytest.mark.parametrize("time", [1, 15, 16, 17, 63, 100, 530]),
    pytest.mark.parametrize("starts", [None, [0], [3, 4, 15, 16, 40, 99, 512]], ids=str),
    each_type,
    pytest.mark.parametrize(
        ("engine", "rule", "decay"),
        [(engine, *decay.values) for engine in ENGINES for decay in DECAYS],
        ids=[f"{engine}-{decay.id}" for engine in ENGINES for decay in DECAYS],
    ),
)
def test_outputs_states_and_gradients(
    time: int, starts: list[int] | None, dtype: torch.dtype, engine: str, rule: Rule, decay: tuple[int, ...] | None
) -> None:
    assert_exact(rule, engine, scan_inputs(time, starts, decay), dtype)


def feature_map(name: str, width: int = WIDTH) -> FeatureMap:
    torch.manual_seed(0)
    options = recipe.Attention(feature_map=name, taylor=recipe.Taylor(width=4))  # type: ignore[arg-type]
    return FEATURE_MAPS[name](HEADS, width, options)


@thinned(
    pytest.mark.parametrize(
        ("rule", "features"),
        [
            *((LINEAR, feature_map(name)) for name in FEATURE_MAPS),
            *((DELTA, UnitFeatures(inner(WIDTH))) for inner in (Elu, Relu)),
            *((LINEAR, feature_map("relu", width)) for width in (2, 16, 33)),
        ],
        ids=[*FEATURE_MAPS, "delta-elu", "delta-relu", "width-2", "width-16", "width-33"],
    ),
    each_type,
)
def test_every_feature_map_and_its_weights(rule: Rule, features: FeatureMap, dtype: torch.dtype) -> None:
    width = features.features if isinstance(features, Relu) else WIDTH
    assert_exact(rule, "native", scan_inputs(70, [50], width=width), dtype, features)


EXTREMES: dict[str, dict[str, float]] = {
    "zero keys": {"k": 0.0},
    "nothing is written": {"beta": 0.0},
    "every value replaces, nothing is forgotten": {"beta": 1.0, "log_decay": 0.0},
    "everything is forgotten": {"log_decay": MIN_LOG_DECAY},
    "the same key": {"k": 1.0, "beta": 1.0},
}


@every_engine
@pytest.mark.parametrize("extreme", EXTREMES)
def test_extreme_gates_and_keys_of_the_delta_rule(engine: str, extreme: str) -> None:
    """All but every third token."""
    x = scan_inputs(300, [0, 130])
    for name, value in EXTREMES[extreme].items():
        getattr(x, name)[:, :, torch.arange(300) % 3 > 0] = value
    assert_exact(DELTA, engine, x)


@every_engine
def test_clamped_denominators_have_no_gradient(engine: str) -> None:
    x = scan_inputs(10)
    assert_exact(LINEAR, engine, x._replace(q=3e-33 * x.q.abs(), k=x.k.abs()), features=Identity())


@every_engine
@pytest.mark.parametrize("channels", [(), (WIDTH,)], ids=["by-head", "by-channel"])
def test_long_memories_are_exact(engine: str, channels: tuple[int, ...]) -> None:
    """An error in the decay of the state over a chunk would add up over all later chunks."""
    x = scan_inputs(6000)._replace(log_decay=torch.full((2, HEADS, 6000, *channels), -1 / 8192, dtype=torch.float64))
    (_, *state), (_, *exact) = results(x, torch.float32, engine), results(x, torch.float64, engine)
    assert max(map(laws.error, state, exact)) < 2e-6


@pytest.mark.parametrize(("gates", "starts"), [(torch.float64, torch.bool), (torch.bfloat16, torch.long)])
def test_gates_and_starts_of_other_types_are_converted(gates: torch.dtype, starts: torch.dtype) -> None:
    x = in_dtype(scan_inputs(70, [30]), torch.float32)
    assert x.log_decay is not None and x.document_starts is not None
    log_decay, state = x.log_decay.to(gates), [t.float() for t in LINEAR.state()]
    other = x._replace(log_decay=log_decay, document_starts=x.document_starts.to(starts))
    y, expected = (
        LINEAR.by("native")(LINEAR.features, inputs, *state)[0]
        for inputs in (other, x._replace(log_decay=log_decay.float()))
    )
    assert torch.equal(y, expected)


@every_rule
def test_the_number_of_threads_changes_nothing(rule: Rule) -> None:
    threads, x, found = torch.get_num_threads(), scan_inputs(300, [100]), []
    for number in (1, 2, 5):
        torch.set_num_threads(number)
        found.append(outputs_and_gradients(rule.by("native"), rule.features, x, rule.state(), torch.float32))
    torch.set_num_threads(threads)
    assert all(torch.equal(found[0][name], other[name]) for other in found[1:] for name in other)


@thinned(
    each_type,
    pytest.mark.parametrize("features", [Elu(WIDTH), Relu(WIDTH)], ids=["elu", "relu"]),
    pytest.mark.parametrize("value", [float("nan"), float("inf")]),
)
def test_values_that_are_not_finite_reach_the_outputs(dtype: torch.dtype, features: FeatureMap, value: float) -> None:
    x = scan_inputs(40, decay=None)
    x.k[0, 0, 20, 3] = value
    y, *_ = LINEAR.by("native")(features, in_dtype(x, dtype), *(t.float() for t in LINEAR.state()))
    assert not y[0, 0, 20:].isfinite().any(), "later outputs show it"
    assert y[0, 0, :16].isfinite().all() and y[0, 1:].isfinite().all() and y[1].isfinite().all()


@needs_native
def test_bfloat16_is_float32_rounded_at_the_end() -> None:
    x = in_dtype(scan_inputs(200, [70]), torch.bfloat16)
    (y, S, _), (wide, wide_S, _) = results(x, torch.bfloat16), results(x)
    assert torch.equal(y, wide.bfloat16()) and torch.equal(S, wide_S)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_more_is_saved_than_documented(dtype: torch.dtype) -> None:
    """Queries, keys and values before the feature map, outputs, gates, starts, denominators, and a state for each
    span. Nothing without gradients."""
    attention = build(recipe.Attention(kind="linear", feature_map="elu", decay="learned"))
    q, k, v, starts, log_decay = random_text(attention, 3 * spans.SPAN + 1, dtype)
    assert log_decay is not None and starts is not None
    leaves = [x.requires_grad_() for x in (q, k, v, log_decay)]
    saved: dict[int, int] = {}

    def count(x: Tensor) -> Tensor:
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    def read() -> tuple[Tensor, LinearState]:
        return attention(q, k, v, attention.init_state(2, v.device, v.dtype), starts, {"log_decay": log_decay})

    with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
        with torch.no_grad():
            read()
        assert not saved
        y, state = read()
    states = 4 * (state.S.nbytes + state.z.nbytes)
    assert sum(saved.values()) == sum(x.nbytes for x in (*leaves, starts, y)) + 4 * log_decay.numel() + states


def test_a_backward_pass_under_autocast_is_the_same() -> None:
    attention = build(recipe.Attention(kind="linear"))
    q, k, v, starts, log_decay = random_text(attention, 200, torch.bfloat16)
    leaves = [x.requires_grad_() for x in (q, k, v, log_decay) if x is not None]

    def gradients() -> Iterator[Tensor]:
        y, state = attention(q, k, v, attention.init_state(2, v.device, v.dtype), starts, {"log_decay": log_decay})
        yield from torch.autograd.grad(y.float().sum() + state.S.sum(), leaves)

    plain = list(gradients())
    with torch.autocast("cpu", torch.bfloat16):
        assert all(map(torch.equal, gradients(), plain))


@pytest.mark.parametrize("kernel", ["torch", "native"])
def test_a_frozen_feature_map_changes_no_other_gradient(kernel: str) -> None:
    attention = build(recipe.Attention(kind="linear", feature_map="hedgehog", decay="none"))
    attention.use_kernel(kernel)
    q, k, v, *_ = random_text(attention, 70, torch.float32)
    q = q.requires_grad_()

    def gradient() -> Tensor:
        y, _ = attention(q, k, v, attention.init_state(2, v.device, v.dtype))
        return torch.autograd.grad(y.square().sum(), q)[0]

    trained = gradient()
    attention.feature_map.requires_grad_(False)  # type: ignore[operator, union-attr]
    assert torch.equal(gradient(), trained)


@pytest.mark.parametrize(("kind", "features"), [(DeltaAttention, Silu(8)), (LinearAttention, Cosine(8))])
def test_a_decay_by_channel_is_refused_where_it_is_not_supported(kind: type, features: FeatureMap) -> None:
    with pytest.raises(UsageError, match=r"decay: \w+ does not support channel"):
        kind(HEADS, 8, 5, features, "channel")


@pytest.mark.parametrize(("kind", "kernel"), [("linear", LinearChunks), ("delta", DeltaChunks), ("ngram", SortKernel)])
def test_an_unknown_kernel_leaves_an_attention_to_torch(kind: str, kernel: type) -> None:
    attention = build(recipe.Attention(kind=kind))  # type: ignore[arg-type]
    assert attention.kernel_name == "native"
    for name in ("torch", "an unknown kernel"):
        attention.use_kernel(name)
        assert attention.kernel_name == "torch" and type(attention.kernel) is kernel
