"""The delta rule in chunks and its own backward pass, against the recurrence and plain autograd."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from attention.cases import HEAD_DIM, HEADS, VALUE_DIM, assert_same_gradients
from attention.scans import Identity, ScanInputs, delta_scan
from grids import thinned
from machine import needs_triton
from torch import Tensor
from torch.nn.functional import normalize

from lmlong.attention import chunks, laws
from lmlong.attention import scan as spans
from lmlong.attention.delta.chunk import ChunkKernel
from lmlong.attention.delta.features import Silu, UnitFeatures
from lmlong.attention.delta.naive import DeltaState, recurrent
from lmlong.attention.delta.native import NativeDelta
from lmlong.attention.delta.triton import TritonDelta
from lmlong.attention.feature_maps import Elu, FeatureMap, Relu
from lmlong.attention.inputs import MIN_LOG_DECAY

Scan = Callable[[FeatureMap, ScanInputs, Tensor], tuple[Tensor, Tensor]]
"""From a feature map, inputs and a state to outputs and the state after."""

NATIVE: Scan = partial(delta_scan, NativeDelta())
TORCH: Scan = partial(delta_scan, ChunkKernel())


@pytest.fixture
def short_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two chunks to a span, so that short texts have borders of both kinds."""
    monkeypatch.setattr(spans, "SPAN", 2 * chunks.CHUNK_SIZE)


def case(time: int, starts: list[int] | None, decay: bool, draw: torch.Generator) -> dict[str, Tensor | None]:
    """Random unit features, values, gates and a state that has read something, in float64."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    begun = None
    if starts is not None:
        begun = torch.zeros(2, time, dtype=torch.bool)
        begun[0, [place for place in starts if place < time]] = True  # the other row has none
    return {
        "fq": normalize(normal(2, HEADS, time, HEAD_DIM), dim=-1).requires_grad_(),
        "fk": normalize(normal(2, HEADS, time, HEAD_DIM), dim=-1).requires_grad_(),
        "v": normal(2, HEADS, time, VALUE_DIM).requires_grad_(),
        "S": normal(2, HEADS, HEAD_DIM, VALUE_DIM).requires_grad_(),
        "starts": begun,
        "log_decay": (-3 * normal(2, HEADS, time) ** 4).requires_grad_() if decay else None,
        "beta": normal(2, HEADS, time).mul(2).sigmoid().requires_grad_(),
    }


def scanned(x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    inputs = ScanInputs(x["fq"], x["fk"], x["v"], x["starts"], x["log_decay"], x["beta"])
    return delta_scan(ChunkKernel(), Identity(), inputs, x["S"])


def folded(x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The recurrence itself."""
    y, state = recurrent(x["fq"], x["fk"], x["v"], x["beta"], DeltaState(x["S"]), x["starts"], x["log_decay"])
    return y, state.S


@thinned(
    pytest.mark.parametrize("time", [1, 5, 63, 64, 129, 257]),
    pytest.mark.parametrize("starts", [None, [0], [64, 128, 256], [3, 4, 63, 65, 129, 255]], ids=str),
)
@pytest.mark.parametrize("decay", [False, True], ids=["kept", "decaying"])
def test_all_gradients_are_those_of_the_recurrence(
    short_spans: None, time: int, starts: list[int] | None, decay: bool
) -> None:
    draw = torch.Generator().manual_seed(time)
    x = case(time, starts, decay, draw)
    assert_same_gradients(x, scanned(x), folded(x), draw)  # type: ignore[arg-type]


def _read(
    x: dict[str, Tensor | None], features: UnitFeatures, scan: Scan, dtype: torch.dtype, slopes: list[Tensor]
) -> dict[str, Tensor]:
    """Outputs, state and all gradients, in a dtype."""
    leaves = {name: t.to(dtype).requires_grad_() for name, t in x.items() if t is not None and t.is_floating_point()}
    gates = leaves.get("log_decay"), leaves["beta"]
    inputs = ScanInputs(leaves["fq"], leaves["fk"], leaves["v"], x["starts"], *gates)
    found = scan(features, inputs, leaves["S"])
    grads = torch.autograd.grad(found, list(leaves.values()), [slope.to(dtype) for slope in slopes])
    return {"y": found[0], "S'": found[1], **{f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}}


@thinned(
    pytest.mark.parametrize("inner", [Silu, Elu, Relu], ids=lambda inner: inner.__name__),
    pytest.mark.parametrize("time", [1, 15, 16, 33, 1030]),
)
@pytest.mark.parametrize("starts", [None, [0, 16, 20, 520]], ids=str)
def test_native_code_is_the_recurrence(time: int, starts: list[int] | None, inner: type[FeatureMap]) -> None:
    """In float32, from raw queries and keys, against chunks in float64."""
    draw = torch.Generator().manual_seed(time)
    x = {name: t.detach() if t is not None else None for name, t in case(time, starts, True, draw).items()}
    features = UnitFeatures(inner(HEAD_DIM))
    slopes = [torch.randn(t.shape, generator=draw, dtype=t.dtype) for t in (x["v"], x["S"])]
    read = [
        _read(x, features, scan, dtype, slopes)
        for scan, dtype in ((NATIVE, torch.float32), (TORCH, torch.float32), (TORCH, torch.float64))
    ]
    for name in read[0]:
        exact = read[2][name]
        mine, torchs = (
            float((one[name].detach().double() - exact).norm() / (exact.norm() + 1e-30)) for one in read[:2]
        )
        assert mine < max(2 * torchs, 2e-6), (name, mine, torchs)


EXTREMES: dict[str, dict[str, float]] = {
    "no key at all": {"fk": 0.0},
    "nothing is written": {"beta": 0.0},
    "every value replaces": {"beta": 1.0},
    "every value replaces, nothing is forgotten": {"beta": 1.0, "log_decay": 0.0},
    "all is forgotten": {"log_decay": MIN_LOG_DECAY},
    "one key for all": {"fk": 1.0, "beta": 1.0},
}


@pytest.mark.parametrize("scan", [NATIVE, TORCH], ids=["native", "torch"])
@pytest.mark.parametrize("extreme", EXTREMES)
def test_gates_and_keys_at_their_ends(scan: Scan, extreme: str) -> None:
    """All but every third token, in float32, against the recurrence in float64: values, state and gradients."""
    draw = torch.Generator().manual_seed(0)
    x = {name: t.detach() if t is not None else None for name, t in case(300, [0, 130], True, draw).items()}
    for name, value in EXTREMES[extreme].items():
        held = x[name]
        assert held is not None
        held[:, :, torch.arange(300) % 3 > 0] = value
    features = UnitFeatures(Silu(HEAD_DIM))

    def by_recurrence(features: FeatureMap, x: ScanInputs, S: Tensor) -> tuple[Tensor, Tensor]:
        fq, fk = features.query(x.q), features.key(x.k)
        assert x.beta is not None
        y, state = recurrent(fq, fk, x.v, x.beta, DeltaState(S), x.document_starts, x.log_decay)
        return y, state.S

    slopes = [torch.randn(t.shape, generator=draw, dtype=t.dtype) for t in (x["v"], x["S"])]  # type: ignore[union-attr]
    mine = _read(x, features, scan, torch.float32, slopes)
    exact = _read(x, features, by_recurrence, torch.float64, slopes)
    for name, found in mine.items():
        assert found.isfinite().all() and laws.error(found, exact[name]) < 2e-5, name


@needs_triton
@pytest.mark.parametrize("time", [2, 64, 150])
@pytest.mark.parametrize("starts", [None, [0, 70]], ids=str)
@pytest.mark.parametrize("decay", [False, True], ids=["kept", "decaying"])
def test_the_triton_kernel_is_the_recurrence_of_torch(
    short_spans: None, time: int, starts: list[int] | None, decay: bool
) -> None:
    draw = torch.Generator().manual_seed(time)
    x = {name: t.detach() if t is not None else None for name, t in case(time, starts, decay, draw).items()}
    features = UnitFeatures(Silu(HEAD_DIM))
    slopes = [torch.randn(t.shape, generator=draw, dtype=t.dtype) for t in (x["v"], x["S"])]
    mine, torchs = (
        _read(x, features, scan, torch.float32, slopes) for scan in (partial(delta_scan, TritonDelta()), TORCH)
    )
    for name in mine:
        assert laws.error(mine[name], torchs[name]) < 1e-6, name
