"""The Triton kernels, on a GPU if there is one, else in Triton's interpreter; test_scans.py compares all kernels."""

from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import pytest
import torch
from attention.scans import DEVICE, VALUES, WAYS, WIDTH, Way, assert_exact, in_dtype
from grids import thinned

from lmlong import recipe
from lmlong.attention import laws
from lmlong.attention.feature_map_registry import FEATURE_MAPS
from lmlong.attention.feature_maps import Elu, FeatureMap
from lmlong.attention.linear.layer import LinearAttention
from lmlong.attention.linear.triton import TritonLinear
from lmlong.model.language_model import LanguageModel

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from lmlong.attention.linear.triton import blocks, operation
from lmlong.model.segments import text_loss

WITHOUT_DECAY, WITH_DECAY, _ = (way for way in WAYS if way.engine == "triton")


def feature_map(name: str, width: int = WIDTH, **options: Any) -> FeatureMap:
    torch.manual_seed(0)
    return FEATURE_MAPS[name](1, width, recipe.Attention(feature_map=name, **options)).to(DEVICE)  # type: ignore[arg-type]


@thinned(
    pytest.mark.parametrize("name", sorted(operation.FUSED.values())),
    pytest.mark.parametrize("tiles", [1, 2, 1000], ids=lambda tiles: f"{tiles}-tiles-a-segment"),
)
def test_every_map_in_segments_of_any_length(monkeypatch: pytest.MonkeyPatch, name: str, tiles: int) -> None:
    monkeypatch.setattr(operation, "MIN_PROGRAMS", 1)
    monkeypatch.setattr(operation, "MAX_SEGMENT", operation.TILE.value * tiles)
    assert_exact(WITH_DECAY, WITH_DECAY.inputs(150, [5, 64, 100], heads=2), features=feature_map(name))


@thinned(
    pytest.mark.parametrize("width", [16, 256, 100, *(pytest.param(n, marks=pytest.mark.slow) for n in (32, 64, 128))]),
    pytest.mark.parametrize("values", [256, 16, 65, 128]),
    pytest.mark.parametrize(
        ("way", "starts"), [(WITH_DECAY, [5, 64]), (WITHOUT_DECAY, None)], ids=["gates", "no-gates"]
    ),
)
def test_every_width(width: int, values: int, way: Way, starts: list[int] | None) -> None:
    assert_exact(way, way.inputs(70, starts, width=width, values=values), features=Elu(width))


@pytest.mark.parametrize("largest", [pytest.param(16, marks=pytest.mark.slow), 32])
def test_blocks_of_any_size(monkeypatch: pytest.MonkeyPatch, largest: int) -> None:
    for kernel, choices in blocks.CHOICES.items():
        small = {size: blocks.Choice(largest, 16, 4, 1) for size in choices}
        monkeypatch.setitem(blocks.CHOICES, kernel, small)
    assert_exact(WITH_DECAY, WITH_DECAY.inputs(70, [5, 64], width=50, values=40), features=Elu(50))


@pytest.mark.parametrize(
    ("name", "width", "options"),
    [
        pytest.param("favor", 16, {"favor": {"features": 256}}, id="favor"),
        pytest.param("taylor", 16, {}, id="taylor"),
        pytest.param("taylor", 64, {}, id="taylor-2145", marks=pytest.mark.slow),
        pytest.param("cosine", 64, {}, id="cosine"),
    ],
)
def test_features_computed_by_torch(name: str, width: int, options: dict[str, Any]) -> None:
    assert_exact(WITH_DECAY, WITH_DECAY.inputs(70, [5], width=width), features=feature_map(name, width, **options))


def test_a_text_whose_states_exceed_the_memory_is_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operation, "MAX_STATES", 1)
    with (
        patch.object(operation, "_scan_op", wraps=operation._scan_op) as scans,
        patch.object(operation, "_scan_backward_op", wraps=operation._scan_backward_op) as backward_scans,
    ):
        assert_exact(WITH_DECAY, WITH_DECAY.inputs(200, [5, 100]))
    assert scans.call_count == backward_scans.call_count == 4


def test_memory_layouts_make_no_difference() -> None:
    x = in_dtype(WITH_DECAY.inputs(40, [7], rows=2, heads=2), torch.float32)
    S, z = x.v.new_zeros(2, 2, WIDTH, VALUES), x.v.new_zeros(2, 2, WIDTH)
    together = torch.cat([y.transpose(1, 2).flatten(2) for y in x[:3]], dim=-1)  # as a model computes them
    expected = WITH_DECAY.scan(Elu(WIDTH), x, S, z)[0]
    for rows in (together, torch.cat([together, together], dim=1)[:, :40]):  # the second: the start of longer rows
        parts = rows.split([2 * WIDTH, 2 * WIDTH, 2 * VALUES], dim=-1)
        q, k, v = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in parts)
        assert torch.equal(WITH_DECAY.scan(Elu(WIDTH), x._replace(q=q, k=k, v=v), S, z)[0], expected)


def attention(decay: str = "learned") -> LinearAttention:
    return LinearAttention(1, WIDTH, VALUES, Elu(WIDTH), decay).to(DEVICE)


@pytest.mark.parametrize("position", [1, 64])
@torch.no_grad()
def test_the_future_never_changes_the_past(position: int) -> None:
    by_triton = attention()
    by_triton.use_kernel("triton")
    texts = (in_dtype(WITH_DECAY.inputs(time), torch.float32)[:5] for time in (101, 102))
    here, there = (laws.cut(text, 0, 101) for text in texts)
    assert here[0] is not None
    assert laws.future_leaves_past(laws.of_attention(by_triton, here[0]), here, there, position) == 0


def test_a_model_has_the_same_loss_and_gradients() -> None:
    torch.manual_seed(0)
    options = recipe.Model(width=32, layers=1, heads=2, attention=recipe.Attention(kind="linear"))
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


def test_the_reason_why_an_attention_cannot_be_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    def reason(of: LinearAttention, device: str) -> str | None:
        return TritonLinear.unavailable_reason(of, torch.device(device))

    precise = attention()
    precise.state_dtype = torch.float64
    assert reason(attention(), DEVICE.type) is None
    assert reason(attention("channel"), DEVICE.type) == "it does not compute decay: channel"
    assert reason(precise, DEVICE.type) == "it computes states in float32, not in float64"
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert reason(attention(), "cpu") == "its kernels need an NVIDIA GPU, and the device is cpu"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert reason(attention(), "cuda") == "its kernels need compute capability 8.0, and the GPU has 7.5"
