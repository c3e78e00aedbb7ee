"""The scans of linear attention and the delta rule, by every kernel, against their recurrences in float64."""

from collections.abc import Sequence
from unittest.mock import patch

import pytest
import torch
from attention.cases import HEAD_DIM, HEADS, VALUE_DIM, build
from attention.scans import (
    DECAYING,
    DEVICE,
    EXACT,
    ON_ALL_MACHINES,
    WAYS,
    WIDTH,
    Identity,
    Way,
    assert_as_exact_as_torch,
    assert_exact,
    each,
    in_dtype,
    scan_inputs,
)
from grids import thinned
from machine import needs_fla, needs_native
from torch import Tensor

from lmlong import recipe
from lmlong.attention import chunks, fla, laws
from lmlong.attention import scan as spans
from lmlong.attention.delta.chunk import ChunkKernel as DeltaChunks
from lmlong.attention.delta.layer import DeltaAttention
from lmlong.attention.delta.naive import Silu, UnitFeatures
from lmlong.attention.device_policy import GPU_POLICY
from lmlong.attention.feature_map_registry import FEATURE_MAPS
from lmlong.attention.feature_maps import Cosine, Elu, FeatureMap, Relu
from lmlong.attention.inputs import MIN_LOG_DECAY
from lmlong.attention.linear.chunk import ChunkKernel as LinearChunks
from lmlong.attention.linear.layer import LinearAttention
from lmlong.attention.linear.naive import LinearState
from lmlong.attention.ngram.sort import SortKernel
from lmlong.attention.scan import ScanInputs
from lmlong.errors import UsageError
from lmlong.testing import random_text

each_type = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)

DTYPES = {
    "native": [torch.float32, torch.bfloat16],
    "torch": EXACT,
    "torch for GPUs": EXACT,
    "triton": [torch.float32, torch.float64],
    "fla": [torch.float32],
}


@pytest.fixture
def short_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two chunks to a span, so that short texts have borders of both kinds."""
    monkeypatch.setattr(spans, "SPAN", 2 * chunks.CHUNK_SIZE)


@pytest.fixture
def float32_by_fla(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let flash-linear-attention compute float32, in which differences show. A GPU would multiply it as TF32."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(fla, "DTYPES", (torch.float32, torch.bfloat16))


@pytest.mark.usefixtures("short_spans", "float32_by_fla")
@thinned(
    pytest.mark.parametrize(
        ("way", "dtype"),
        [
            pytest.param(point.values[0], dtype, marks=point.marks, id=f"{point.id}-{dtype}")
            for point in each(WAYS).args[1]
            for dtype in DTYPES[point.values[0].engine]
        ],
    ),
    pytest.mark.parametrize("time", [131, 257, 64, 520, 63, 17, 15, 1]),
    pytest.mark.parametrize("starts", [None, [64, 128, 256, 384], [0, 3, 4, 15, 63, 65, 129, 255, 511, 641]], ids=str),
)
def test_outputs_states_and_gradients(way: Way, dtype: torch.dtype, time: int, starts: list[int] | None) -> None:
    assert_exact(way, way.inputs(time, starts), dtype)


@pytest.mark.usefixtures("short_spans")
@each([way for way in WAYS if way.engine == "torch for GPUs"])
def test_many_spans_on_a_gpu(way: Way) -> None:
    shortest = way._replace(policy=GPU_POLICY._replace(span_bytes=1))
    assert_exact(shortest, way.inputs(700, [3, 128, 511]), torch.float64)


@pytest.mark.usefixtures("float32_by_fla")
@each([way for way in WAYS if way.engine in ("triton", "fla") and way.decay is not None])
def test_the_strongest_decay_of_libraries(way: Way) -> None:
    """At most tokens: factors of both would overflow if the kernels took them apart."""
    x = way.inputs(70, [0, 64])
    assert x.log_decay is not None
    x.log_decay[:, :, torch.arange(70) % 3 > 0] = MIN_LOG_DECAY
    if way.engine == "fla" and DEVICE.type == "cuda":
        assert_as_exact_as_torch(way, x)
    else:
        assert_exact(way, x)


@each([way for way in WAYS if way.engine in ("triton", "fla")])
def test_libraries_are_as_exact_as_torch_in_bfloat16(way: Way) -> None:
    assert_as_exact_as_torch(way, way.inputs(70, [10]))


@needs_fla
@pytest.mark.usefixtures("float32_by_fla")
def test_the_effect_of_the_delta_rule_by_fla() -> None:
    """By fla's definition of its kernel: the interpreter would take a minute."""
    from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule as definition

    attention = build(recipe.Attention(kind="delta"))
    attention.kernel = fla.FlaDelta()
    text, before = (random_text(attention, time, torch.float32) for time in (150, 40))
    with patch.object(fla.FlaDelta, "library", side_effect=definition) as library:
        assert laws.parts_equal_forward(attention, before, text, [1, 70]) < 2e-5
    assert {call.kwargs["v"].shape[-1] for call in library.call_args_list} == {VALUE_DIM, VALUE_DIM + HEAD_DIM}


def feature_map(name: str, width: int = WIDTH) -> FeatureMap:
    torch.manual_seed(0)
    options = recipe.Attention(feature_map=name, taylor=recipe.Taylor(width=4))  # type: ignore[arg-type]
    return FEATURE_MAPS[name](HEADS, width, options)


NATIVE_LINEAR, NATIVE_DELTA = NATIVE = [way for way in DECAYING if way.engine == "native"]


@thinned(
    pytest.mark.parametrize(
        ("way", "features"),
        [
            *((NATIVE_LINEAR, feature_map(name)) for name in FEATURE_MAPS),
            *((NATIVE_DELTA, UnitFeatures(inner(WIDTH))) for inner in (Elu, Relu)),
            *((NATIVE_LINEAR, feature_map("relu", width)) for width in (2, 16, 33)),
        ],
        ids=[*FEATURE_MAPS, "delta-elu", "delta-relu", "width-2", "width-16", "width-33"],
    ),
    each_type,
)
def test_every_feature_map_and_its_weights(way: Way, features: FeatureMap, dtype: torch.dtype) -> None:
    width = features.features if isinstance(features, Relu) else WIDTH
    assert_exact(way, way.inputs(70, [50], width=width), dtype, features)


EXTREMES: dict[str, dict[str, float]] = {
    "zero keys": {"k": 0.0},
    "nothing is written": {"beta": 0.0},
    "every value replaces, nothing is forgotten": {"beta": 1.0, "log_decay": 0.0},
    "everything is forgotten": {"log_decay": MIN_LOG_DECAY},
    "the same key": {"k": 1.0, "beta": 1.0},
}


@each([way for way in DECAYING if way in ON_ALL_MACHINES and not way.normalizes])
@pytest.mark.parametrize("extreme", EXTREMES)
def test_extreme_gates_and_keys_of_the_delta_rule(way: Way, extreme: str) -> None:
    """All but every third token."""
    x = way.inputs(300, [0, 130])
    for field, value in EXTREMES[extreme].items():
        getattr(x, field)[:, :, torch.arange(300) % 3 > 0] = value
    assert_exact(way, x)


@pytest.mark.usefixtures("float32_by_fla")
@each([way for way in WAYS if way.normalizes and way.decay == ((WIDTH,) if way.engine == "fla" else ())])
def test_clamped_denominators_have_no_gradient(way: Way) -> None:
    x = way.inputs(70)
    x = x._replace(q=1e-33 * x.q.abs(), k=x.k.abs())
    assert_exact(way, x, features=Identity(WIDTH))
    assert way.exact(x, Identity(WIDTH))["y"].norm() > 0.01


@torch.no_grad()
def forward(way: Way, x: ScanInputs, dtype: torch.dtype = torch.float32) -> Sequence[Tensor]:
    """Return outputs and the state after."""
    state = (t.to(torch.promote_types(dtype, torch.float32)) for t in way.state(x, way.features))
    return way.scan(way.features, in_dtype(x, dtype), *state)


@each([way for way in ON_ALL_MACHINES if way.normalizes and way.decay is not None])
def test_long_memories_are_exact(way: Way) -> None:
    """An error in the decay of the state over a chunk would add up over all later chunks."""
    x = way.inputs(6000)
    assert x.log_decay is not None
    x.log_decay.fill_(-1 / 8192)
    (_, *state), (_, *exact) = forward(way, x), forward(way, x, torch.float64)
    assert max(map(laws.error, state, exact)) < 2e-6


@pytest.mark.parametrize(("gates", "starts"), [(torch.float64, torch.bool), (torch.bfloat16, torch.long)])
def test_gates_and_starts_of_other_types_are_converted(gates: torch.dtype, starts: torch.dtype) -> None:
    x, way = in_dtype(scan_inputs(70, [30]), torch.float32), NATIVE_LINEAR
    assert x.log_decay is not None and x.document_starts is not None
    log_decay, state = x.log_decay.to(gates), [t.float() for t in way.state(x, way.features)]
    other = x._replace(log_decay=log_decay, document_starts=x.document_starts.to(starts))
    y, expected = (
        way.scan(way.features, inputs, *state)[0] for inputs in (other, x._replace(log_decay=log_decay.float()))
    )
    assert torch.equal(y, expected)


@each(NATIVE)
def test_the_number_of_threads_changes_nothing(way: Way) -> None:
    threads, x, found = torch.get_num_threads(), way.inputs(300, [100]), []
    for number in (1, 2, 5):
        torch.set_num_threads(number)
        found.append(way.results(x, torch.float32))
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
    y, *_ = NATIVE_LINEAR.scan(features, in_dtype(x, dtype), *(t.float() for t in NATIVE_LINEAR.state(x, features)))
    assert not y[0, 0, 20:].isfinite().any(), "later outputs show it"
    assert y[0, 0, :16].isfinite().all() and y[0, 1:].isfinite().all() and y[1].isfinite().all()


@needs_native
def test_bfloat16_is_float32_rounded_at_the_end() -> None:
    x = in_dtype(scan_inputs(200, [70]), torch.bfloat16)
    (y, S, _), (wide, wide_S, _) = (forward(NATIVE_LINEAR, x, dtype) for dtype in (torch.bfloat16, torch.float32))
    assert torch.equal(y, wide.bfloat16()) and torch.equal(S, wide_S)


@each_type
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
