"""The Triton kernels against the definition, on a GPU where there is one, else in Triton's interpreter."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch
from attention.scans import ScanInputs, linear_scan
from torch import Tensor

from lmlong import recipe
from lmlong.attention import laws
from lmlong.attention import scan as spans
from lmlong.attention.feature_maps import FeatureMap
from lmlong.attention.linear.chunk import ChunkKernel
from lmlong.attention.linear.layer import LinearAttention
from lmlong.attention.linear.naive import quadratic
from lmlong.attention.linear.triton import TritonLinear
from lmlong.attention.registry import FEATURE_MAPS
from lmlong.attention.scan import Kernel
from lmlong.model.language_model import LanguageModel

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from lmlong.attention.linear.triton import operation

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WIDTH, VALUES = 12, 10
"""Of keys and values: no powers of 2, and not the same."""

AROUND = 20
"""Tokens before and after those that the kernels read."""


@pytest.fixture(params=[1, 2, None], ids=lambda tiles: f"{tiles or 'all'}-tiles-a-segment")
def segments(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operation, "MIN_PROGRAMS", 1)
    monkeypatch.setattr(operation, "MAX_SEGMENT", operation.TILE.value * (request.param or 1000))


def text(
    time: int, starts: list[int] | None, decay: bool, rows: int = 1, heads: int = 2, channels: int | None = None
) -> ScanInputs:
    """A random text in float64; documents start at places counted from the first token that the kernels read. With
    `channels`, each has a decay."""
    draw = torch.Generator().manual_seed(time)
    time += 2 * AROUND

    def normal(*shape: int) -> Tensor:
        return torch.randn(rows, heads, time, *shape, generator=draw, dtype=torch.float64).to(DEVICE).requires_grad_()

    begun = None
    if starts is not None:
        begun = torch.zeros(rows, time, dtype=torch.bool, device=DEVICE)
        begun[0, [AROUND + place for place in starts if AROUND + place < time]] = True  # other rows have none
    log_decay = (-(normal(*[channels] * bool(channels)).detach() ** 2) / 20).requires_grad_() if decay else None
    return ScanInputs(normal(WIDTH), normal(WIDTH), normal(VALUES), begun, log_decay)


def part(x: ScanInputs, begin: int, stop: int, dtype: torch.dtype) -> ScanInputs:
    """The inputs of the tokens from `begin` up to `stop`, gates in float32 at least."""
    q, k, v, starts, log_decay, _ = laws.cut(x, begin, stop)
    assert q is not None and k is not None and v is not None
    gates = None if log_decay is None else log_decay.to(torch.promote_types(dtype, torch.float32))
    return ScanInputs(q.to(dtype), k.to(dtype), v.to(dtype), starts, gates)


def read(features: FeatureMap, x: ScanInputs, by: Kernel, dtype: torch.dtype = torch.float32) -> Tensor:
    """A text whose first and last tokens are read in float64, and those between by another function and type."""
    rows, heads, time = x.q.shape[:3]
    width = features.key(x.k[:1, :, :1]).shape[-1]
    S, z = x.v.new_zeros(rows, heads, width, VALUES), x.v.new_zeros(rows, heads, width)
    before, S, z = linear_scan(ChunkKernel(), features, part(x, 0, AROUND, torch.float64), S, z)
    y, S, z = linear_scan(by, features, part(x, AROUND, time - AROUND, dtype), S.float(), z.float())
    after, _, _ = linear_scan(
        ChunkKernel(), features, part(x, time - AROUND, time, torch.float64), S.double(), z.double()
    )
    return torch.cat([before, y.double(), after], dim=2)


def errors(features: FeatureMap, x: ScanInputs, measured: Tensor) -> Iterator[tuple[str, float]]:
    """Of the outputs and of all gradients, against the definition in float64."""
    truth = quadratic(features.query(x.q), features.key(x.k), x.v, x.document_starts, x.log_decay)
    yield "y", laws.error(measured, truth)
    leaves = {name: t for name, t in x._asdict().items() if t is not None and t.requires_grad}
    leaves |= {f"weight {number}": weight for number, weight in enumerate(features.parameters())}
    upstream = torch.randn(truth.shape, generator=torch.Generator().manual_seed(0), dtype=truth.dtype).to(DEVICE)
    mine, exact = (torch.autograd.grad(y, list(leaves.values()), upstream) for y in (measured, truth))
    yield from zip(leaves, map(laws.error, mine, exact), strict=True)


class Squares(FeatureMap):
    """A feature map that no kernel knows."""

    def query(self, q: Tensor) -> Tensor:
        return q * q + 0.1

    def key(self, k: Tensor) -> Tensor:
        return k * k + 0.1


def feature_map(name: str) -> FeatureMap:
    torch.manual_seed(0)
    return FEATURE_MAPS[name](2, WIDTH, recipe.Attention(feature_map=name)).double().to(DEVICE)  # type: ignore[arg-type]


@pytest.mark.parametrize("time", [1, 63, 64, 65, 131])
@pytest.mark.parametrize("starts", [None, [0, 64, 128], [3, 4, 63, 65, 130]], ids=str)
@pytest.mark.parametrize("decay", [False, True], ids=["kept", "decaying"])
def test_outputs_and_gradients_are_those_of_the_definition(time: int, starts: list[int] | None, decay: bool) -> None:
    x, features = text(time, starts, decay, heads=1), feature_map("elu")
    for name, error in errors(features, x, read(features, x, TritonLinear())):
        assert error < 5e-6, name


@pytest.mark.parametrize("name", sorted(operation.FUSED.values()))
def test_every_map_in_segments_of_any_length(segments: None, name: str) -> None:
    x, features = text(150, [5, 64, 100], True), feature_map(name)
    for name, error in errors(features, x, read(features, x, TritonLinear())):
        assert error < 5e-6, name


@pytest.mark.parametrize("time", [1, 17, 70])
@pytest.mark.parametrize("starts", [None, [0, 16], [3, 4, 63, 65]], ids=str)
def test_a_decay_for_each_channel(monkeypatch: pytest.MonkeyPatch, time: int, starts: list[int] | None) -> None:
    monkeypatch.setattr(spans, "SPAN", 32)
    x, features = text(time, starts, True, channels=WIDTH), feature_map("elu")
    for name, error in errors(features, x, read(features, x, TritonLinear())):
        assert error < 5e-6, name


def test_a_decay_for_each_channel_and_weights_of_a_feature_map() -> None:
    features = feature_map("favor")
    x = text(40, [5], True, rows=2, channels=features.features)
    for name, error in errors(features, x, read(features, x, TritonLinear())):
        assert error < 2e-5, name
    mine, torchs = (read(features, x, by, torch.bfloat16) for by in (TritonLinear(), ChunkKernel()))
    for (name, error), (_, usual) in zip(errors(features, x, mine), errors(features, x, torchs), strict=True):
        assert error < 4 * usual, name


@pytest.mark.parametrize("features", [Squares(WIDTH), feature_map("taylor")], ids=["squares", "taylor"])
def test_other_maps_are_left_to_torch(features: FeatureMap) -> None:
    x = text(70, [5], True, rows=2)
    for name, error in errors(features, x, read(features, x, TritonLinear())):
        assert error < 2e-5, name


def test_bfloat16_is_no_less_exact_than_by_torch() -> None:
    x, features = text(70, [40], True, rows=2), feature_map("elu")
    mine, torchs = (read(features, x, by, torch.bfloat16) for by in (TritonLinear(), ChunkKernel()))
    for (name, error), (_, usual) in zip(errors(features, x, mine), errors(features, x, torchs), strict=True):
        assert error < 4 * usual, name  # the interpreter cuts digits off where a GPU rounds


def test_rows_may_lie_in_any_order() -> None:
    x, features = part(text(40, [7], True, rows=2), 0, 80, torch.float32), feature_map("elu").float()
    S, z = x.v.new_zeros(2, 2, WIDTH, VALUES), x.v.new_zeros(2, 2, WIDTH)
    together = torch.cat([y.transpose(1, 2).flatten(2) for y in x[:3]], dim=-1)  # as a model makes them
    parts = together.split([2 * WIDTH, 2 * WIDTH, 2 * VALUES], dim=-1)
    q, k, v = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in parts)
    here, there = (linear_scan(TritonLinear(), features, laid, S, z)[0] for laid in (x, x._replace(q=q, k=k, v=v)))
    assert torch.equal(here, there)


@pytest.mark.parametrize("place", [1, 63, 64, 100])
def test_the_future_never_changes_the_past(place: int) -> None:
    attention = LinearAttention(2, WIDTH, WIDTH, feature_map("elu"), "learned").to(DEVICE)
    attention.use_kernel("triton")
    here, there = (part(text(time, None, True), 0, 101, torch.float32) for time in (61, 62))
    here, there = (x._replace(v=x.v.repeat(1, 1, 1, 2)[..., :WIDTH]) for x in (here, there))
    with torch.no_grad():
        assert laws.future_leaves_past(laws.of_attention(attention, here.q), here[:5], there[:5], place) == 0


def test_a_model_read_by_kernels_is_the_same() -> None:
    torch.manual_seed(0)
    model = LanguageModel(recipe.Model(width=32, layers=2, heads=2, attention=recipe.Attention(kind="linear")), 50).to(
        DEVICE
    )
    tokens = torch.randint(50, (1, 90)).to(DEVICE)
    starts = torch.arange(90)[None].to(DEVICE) == 70
    weights, losses, gradients = list(model.parameters()), [], []
    for by in ("torch", "triton"):
        model.use_kernel(by)
        nats, _ = model.loss(tokens, tokens, starts, segment=40)
        losses.append(nats)
        gradients.append(torch.autograd.grad(nats, weights))
    assert laws.error(losses[1], losses[0]) < 1e-6
    for mine, exact in zip(*reversed(gradients), strict=True):
        assert laws.error(mine, exact) < 1e-4


def test_sums_in_float64_are_left_to_torch() -> None:
    x = part(text(10, None, False), 0, 50, torch.float32)
    S, z = (x.v.new_zeros(1, 2, WIDTH, *rest, dtype=torch.float64) for rest in ((VALUES,), ()))
    found, usual = (linear_scan(by, feature_map("elu"), x, S, z) for by in (TritonLinear(), ChunkKernel()))
    assert all(map(torch.equal, found, usual))
