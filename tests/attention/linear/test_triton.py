"""The Triton kernels against torch in float64, on a GPU if there is one, else in Triton's interpreter."""

from collections import Counter
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from attention.scans import (
    VALUES,
    WIDTH,
    Identity,
    ScanInputs,
    in_dtype,
    linear_scan,
    outputs_and_gradients,
    scan_inputs,
)
from grids import thinned
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lmlong import recipe
from lmlong.attention import laws
from lmlong.attention.feature_map_registry import FEATURE_MAPS
from lmlong.attention.feature_maps import FeatureMap
from lmlong.attention.linear.chunk import ChunkKernel
from lmlong.attention.linear.layer import LinearAttention
from lmlong.attention.linear.triton import TritonLinear
from lmlong.attention.scan import Kernel
from lmlong.model.language_model import LanguageModel

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from lmlong.attention.linear.triton import blocks, operation
from lmlong.model.segments import text_loss

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def text(
    time: int,
    starts: list[int] | None = None,
    decay: tuple[int, ...] | None = (),
    rows: int = 1,
    heads: int = 1,
    width: int = WIDTH,
    values: int = VALUES,
) -> ScanInputs:
    """Draw inputs of few rows and heads: the interpreter is slow."""
    x = scan_inputs(time, starts, decay, width, values)
    parts = (None if t is None else t[:rows] if t.ndim == 2 else t[:rows, :heads] for t in x)
    return ScanInputs(*(None if t is None else t.to(DEVICE) for t in parts))  # type: ignore[arg-type]


def feature_map(name: str, heads: int = 1, width: int = WIDTH, **options: Any) -> FeatureMap:
    torch.manual_seed(0)
    return FEATURE_MAPS[name](heads, width, recipe.Attention(feature_map=name, **options)).to(DEVICE)  # type: ignore[arg-type]


def results(
    features: FeatureMap, x: ScanInputs, kernel: Kernel, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    size = features.key(x.k.to(torch.float32)).shape[-1]
    shapes = [(*x.q.shape[:2], size, x.v.shape[3]), (*x.q.shape[:2], size)]
    S, z = (torch.rand(shape, generator=draw).double().to(DEVICE) for shape in shapes)
    return outputs_and_gradients(partial(linear_scan, kernel), features, x, (S, z), dtype)


def assert_exact(features: FeatureMap, x: ScanInputs) -> None:
    measured = results(features, x, TritonLinear())
    exact = results(features.double(), x, ChunkKernel(), torch.float64)
    features.float()
    for name, result in measured.items():
        # a gradient may be exactly 0
        assert (result - exact[name]).norm() < 2e-5 * (exact[name].norm() + 1), name


@thinned(
    pytest.mark.parametrize("time", [1, 63, 64, 65, 131]),
    pytest.mark.parametrize("starts", [None, [0, 64, 128], [3, 4, 63, 65, 130]], ids=str),
    pytest.mark.parametrize("decay", [None, ()], ids=["kept", "decaying"]),
)
def test_outputs_and_gradients(time: int, starts: list[int] | None, decay: tuple[int, ...] | None) -> None:
    assert_exact(feature_map("elu"), text(time, starts, decay))


@thinned(
    pytest.mark.parametrize("name", sorted(operation.FUSED.values())),
    pytest.mark.parametrize("tiles", [1, 2, 1000], ids=lambda tiles: f"{tiles}-tiles-a-segment"),
)
def test_every_map_in_segments_of_any_length(monkeypatch: pytest.MonkeyPatch, name: str, tiles: int) -> None:
    monkeypatch.setattr(operation, "MIN_PROGRAMS", 1)
    monkeypatch.setattr(operation, "MAX_SEGMENT", operation.TILE.value * tiles)
    assert_exact(feature_map(name), text(150, [5, 64, 100], heads=2))


@thinned(
    pytest.mark.parametrize("width", [16, 256, 100, *(pytest.param(n, marks=pytest.mark.slow) for n in (32, 64, 128))]),
    pytest.mark.parametrize("values", [256, 16, 65, 128]),
    pytest.mark.parametrize("gates", [True, False], ids=["gates", "no-gates"]),
)
def test_every_width(width: int, values: int, gates: bool) -> None:
    starts, decay = ([5, 64], ()) if gates else (None, None)
    assert_exact(feature_map("elu", width=width), text(70, starts, decay, width=width, values=values))


@pytest.mark.parametrize("largest", [pytest.param(16, marks=pytest.mark.slow), 32])
def test_blocks_of_any_size(monkeypatch: pytest.MonkeyPatch, largest: int) -> None:
    for kernel, choices in blocks.CHOICES.items():
        small = {size: blocks.Choice(largest, 16, 4, 1) for size in choices}
        monkeypatch.setitem(blocks.CHOICES, kernel, small)
    assert_exact(feature_map("elu", width=50), text(70, [5, 64], width=50, values=40))


@pytest.mark.parametrize(
    "features",
    [
        pytest.param(("favor", 16, {"favor": {"features": 256}}), id="favor"),
        pytest.param(("taylor", 16, {}), id="taylor"),
        pytest.param(("taylor", 64, {}), id="taylor-2145", marks=pytest.mark.slow),
        pytest.param(("cosine", 64, {}), id="cosine"),
    ],
)
def test_features_computed_by_torch(features: tuple[str, int, dict[str, Any]]) -> None:
    name, width, options = features
    assert_exact(feature_map(name, width=width, **options), text(70, [5], width=width))


class Calls(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[function.name()] += 1
        return function(*args, **(kwargs or {}))


def test_a_text_whose_states_exceed_the_memory_is_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    features, x = feature_map("elu"), text(200, [5, 100])
    whole = results(features, x, TritonLinear())
    monkeypatch.setattr(operation, "MAX_STATES", 1)
    with Calls() as calls:
        parts = results(features, x, TritonLinear())
    assert calls.counts["lmlong::linear_scan"] == calls.counts["lmlong::linear_scan_backward"] == 4
    for name, result in parts.items():
        assert laws.error(result, whole[name]) < 1e-5, name


def test_clamped_denominators_have_no_gradient() -> None:
    x = text(10, width=16)
    x = x._replace(q=3e-33 * x.q.abs(), k=x.k.abs())
    assert_exact(Identity(), x)
    assert results(Identity(), x, TritonLinear())["y"].norm() > 0.01


class Squares(FeatureMap):
    """A feature map that the kernels do not compute."""

    def query(self, q: Tensor) -> Tensor:
        return q * q + 0.1


def test_other_maps_are_left_to_torch() -> None:
    assert_exact(Squares(WIDTH), text(40, [5], rows=2, heads=2))


def test_bfloat16_is_as_exact_as_torch() -> None:
    x, features = text(30, [10]), feature_map("elu")
    exact = results(features, x, ChunkKernel(), torch.float64)
    triton, by_torch = (results(features, x, kernel, torch.bfloat16) for kernel in (TritonLinear(), ChunkKernel()))
    for name, truth in exact.items():
        # the interpreter truncates digits where a GPU rounds
        assert laws.error(triton[name], truth) < 4 * max(laws.error(by_torch[name], truth), 1e-6), name


def test_memory_layouts_make_no_difference() -> None:
    x, features = in_dtype(text(40, [7], rows=2, heads=2), torch.float32), feature_map("elu")
    S, z = x.v.new_zeros(2, 2, WIDTH, VALUES), x.v.new_zeros(2, 2, WIDTH)
    together = torch.cat([y.transpose(1, 2).flatten(2) for y in x[:3]], dim=-1)  # as a model computes them
    parts = together.split([2 * WIDTH, 2 * WIDTH, 2 * VALUES], dim=-1)
    q, k, v = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in parts)
    here, there = (linear_scan(TritonLinear(), features, laid, S, z)[0] for laid in (x, x._replace(q=q, k=k, v=v)))
    assert torch.equal(here, there)


@pytest.mark.parametrize("position", [1, 64])
@torch.no_grad()
def test_the_future_never_changes_the_past(position: int) -> None:
    attention = LinearAttention(1, WIDTH, VALUES, feature_map("elu"), "learned").to(DEVICE)
    attention.use_kernel("triton")
    here, there = (laws.cut(in_dtype(text(time), torch.float32)[:5], 0, 101) for time in (101, 102))
    assert here[0] is not None
    assert laws.future_leaves_past(laws.of_attention(attention, here[0]), here, there, position) == 0


def test_a_model_has_the_same_loss_and_gradients() -> None:
    torch.manual_seed(0)
    options = recipe.Model(width=32, layers=2, heads=2, attention=recipe.Attention(kind="linear"))
    model = LanguageModel(options, 50).to(DEVICE)
    tokens = torch.randint(50, (1, 60)).to(DEVICE)
    starts = torch.arange(60)[None].to(DEVICE) == 50
    weights, losses, gradients = list(model.parameters()), [], []
    for by in ("torch", "triton"):
        model.use_kernel(by)
        nats, _ = text_loss(model, tokens, tokens, starts, segment=40)
        losses.append(nats)
        gradients.append(torch.autograd.grad(nats, weights))
    assert laws.error(losses[1], losses[0]) < 1e-6
    for mine, exact in zip(*reversed(gradients), strict=True):
        assert laws.error(mine, exact) < 1e-4


@pytest.mark.parametrize(("dtype", "decay"), [(torch.float64, ()), (torch.float32, (WIDTH,))], ids=str)
def test_states_in_float64_and_a_decay_for_each_channel_are_left_to_torch(
    dtype: torch.dtype, decay: tuple[int, ...]
) -> None:
    x, features = text(10, decay=decay), feature_map("elu")
    triton, by_torch = (results(features, x, kernel, dtype) for kernel in (TritonLinear(), ChunkKernel()))
    assert all(map(torch.equal, triton.values(), by_torch.values()))


def test_the_reason_why_an_attention_cannot_be_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = LinearAttention(1, WIDTH, VALUES, feature_map("elu"), "learned")
    by_channel = LinearAttention(1, WIDTH, VALUES, feature_map("elu"), "channel")
    assert TritonLinear.unavailable_reason(attention, DEVICE) is None
    assert TritonLinear.unavailable_reason(by_channel, DEVICE) == "it does not compute decay: channel"
    attention.state_dtype = torch.float64
    assert TritonLinear.unavailable_reason(attention, DEVICE) == "it computes states in float32, not in float64"
    attention.state_dtype = torch.float32
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    reason = TritonLinear.unavailable_reason(attention, torch.device("cpu"))
    assert reason == "its kernels need an NVIDIA GPU, and the device is cpu"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    reason = TritonLinear.unavailable_reason(attention, torch.device("cuda"))
    assert reason == "its kernels need compute capability 8.0, and the GPU has 7.5"
