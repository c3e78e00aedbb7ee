"""The adapters to flash-linear-attention against torch in float64.

Without a GPU, its functions are replaced by its own definitions of them, token by token, and in some tests its kernels
run in Triton's interpreter.
"""

import re
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import pytest
import torch
from attention.cases import HEAD_DIM, VALUE_DIM, build
from attention.scans import WIDTH, Identity, ScanInputs, delta_scan, linear_scan, outputs_and_gradients, scan_inputs
from grids import thinned
from torch import Tensor

from lmlong import recipe
from lmlong.attention import fla as fla_kernels
from lmlong.attention import laws
from lmlong.attention.delta.chunk import ChunkKernel as DeltaChunks
from lmlong.attention.delta.layer import DeltaAttention
from lmlong.attention.delta.naive import Silu, UnitFeatures
from lmlong.attention.feature_maps import Elu, FeatureMap
from lmlong.attention.fla import FlaDelta, FlaLinear
from lmlong.attention.inputs import MIN_LOG_DECAY
from lmlong.attention.linear.chunk import ChunkKernel as LinearChunks
from lmlong.testing import random_text

if not (find_spec("fla") and find_spec("triton")):
    pytest.skip("flash-linear-attention is not installed", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about a machine without a GPU
    import triton
    from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule
    from fla.ops.gla.naive import naive_recurrent_gla
    from triton.runtime.autotuner import Autotuner

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
STARTS = [None, [0], [3, 4, 63, 64, 129]]

every_start = pytest.mark.parametrize("starts", STARTS, ids=str)
every_decay = pytest.mark.parametrize(
    "decay", ["none", "by head", "by channel"], ids=["delta-none", "delta-by-head", "linear-by-channel"]
)


def naive_gla(scale: float, q: Tensor, g: Tensor, **inputs: Any) -> tuple[Tensor, Tensor]:
    return naive_recurrent_gla(q=q * (scale * q.shape[-1] ** 0.5), gk=g, **inputs)


@pytest.fixture
def float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the library compute float32, in which differences show."""
    monkeypatch.setattr(fla_kernels, "DTYPES", (torch.float32, torch.bfloat16))


@pytest.fixture
def naive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the library's functions by its definitions of them."""
    monkeypatch.setattr(FlaDelta, "library", staticmethod(naive_recurrent_gated_delta_rule))
    monkeypatch.setattr(FlaLinear, "library", staticmethod(naive_gla))


class Index(int):
    """A loop variable of a kernel in Triton's interpreter, which is an int there."""

    def to(self, dtype: Any) -> "Index":
        return self


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Triton's interpreter run the library's kernels where there is no GPU, each in its first configuration."""
    if DEVICE.type == "cuda":
        return
    monkeypatch.setattr(Autotuner, "run", first_configuration(Autotuner.run))
    for name in ("chunk_h", "chunk_delta_h"):
        monkeypatch.setattr(sys.modules[f"fla.ops.common.{name}"], "range", indices, raising=False)


def first_configuration(run: Callable[..., Any]) -> Callable[..., Any]:
    def only(self: Autotuner, *args: Any, **options: Any) -> Any:
        with patch.object(self, "configs", self.configs[:1]):
            return run(self, *args, **options)

    return only


def indices(*bounds: Any) -> Iterator[Index]:
    return map(Index, range(*(int(getattr(bound, "value", bound)) for bound in bounds)))


def text(
    decay: str, time: int, starts: list[int] | None = None, width: int = WIDTH, rows: int = 2, heads: int = 3
) -> ScanInputs:
    """Draw inputs; a decay by channel makes them those of linear attention."""
    x = scan_inputs(time, starts, {"none": None, "by head": (), "by channel": (width,)}[decay], width)
    if decay == "by channel":
        x = x._replace(beta=None)
    parts = (None if t is None else t[:rows] if t.ndim == 2 else t[:rows, :heads] for t in x)
    return ScanInputs(*(None if t is None else t.to(DEVICE) for t in parts))  # type: ignore[arg-type]


def features_of(x: ScanInputs) -> FeatureMap:
    width = x.q.shape[-1]
    return Elu(width) if x.beta is None else UnitFeatures(Silu(width))


def results(x: ScanInputs, fla: bool, dtype: torch.dtype, features: FeatureMap | None = None) -> dict[str, Tensor]:
    """Return outputs, the state after and all gradients, by the library or by torch."""
    draw, shape = torch.Generator().manual_seed(1), (*x.q.shape[:2], x.q.shape[-1])
    state = [torch.rand(size, generator=draw).double().to(DEVICE) for size in ((*shape, x.v.shape[-1]), shape)]
    if x.beta is not None:
        scan, state = partial(delta_scan, FlaDelta() if fla else DeltaChunks()), state[:1]
    else:
        scan = partial(linear_scan, FlaLinear() if fla else LinearChunks())  # type: ignore[assignment]
    return outputs_and_gradients(scan, features or features_of(x), x, state, dtype)


def assert_exact(x: ScanInputs, bound: float, features: FeatureMap | None = None) -> None:
    measured, exact = (
        results(x, fla, dtype, features) for fla, dtype in ((True, torch.float32), (False, torch.float64))
    )
    for name, result in measured.items():
        assert result.isfinite().all()
        # a gradient may be exactly 0
        assert (result - exact[name]).norm() < bound * (exact[name].norm() + 1e-2), name


def assert_as_exact_as_torch(x: ScanInputs) -> None:
    """In bfloat16, errors are about those of torch."""
    exact = results(x, False, torch.float64)
    fla, by_torch = (results(x, fla, torch.bfloat16) for fla in (True, False))
    for name, truth in exact.items():
        assert laws.error(fla[name], truth) < 3 * max(laws.error(by_torch[name], truth), 1e-6), name


@pytest.mark.usefixtures("naive", "float32")
def test_the_effect_of_the_delta_rule() -> None:
    attention = build(recipe.Attention(kind="delta"))
    attention.kernel = FlaDelta()
    read, before = (random_text(attention, time, torch.float32) for time in (150, 40))
    with patch.object(FlaDelta, "library", side_effect=naive_recurrent_gated_delta_rule) as library:
        assert laws.parts_equal_forward(attention, before, read, [1, 70]) < 2e-5
    assert {call.kwargs["v"].shape[-1] for call in library.call_args_list} == {VALUE_DIM, VALUE_DIM + HEAD_DIM}


def test_torch_computes_values_wider_than_the_library_does() -> None:
    v, state = torch.zeros(1, 1, 1, fla_kernels.MAX_WIDTH + 2).bfloat16(), torch.zeros(1, 1, 8, 1)
    assert fla_kernels.computes(v[..., 2:], state) and not fla_kernels.computes(v, state)


@thinned(every_decay, every_start, pytest.mark.parametrize("time", [64, 67, 130]))
def test_outputs_states_and_gradients(
    naive: None, float32: None, decay: str, starts: list[int] | None, time: int
) -> None:
    assert_exact(text(decay, time, starts), 2e-5)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of factors of later keys, which the kernels replace by 0
@thinned(
    every_decay,
    every_start,
    pytest.mark.parametrize("strong", [False, True], ids=["weak", "strong"]),
    pytest.mark.parametrize("time", [70, 130]),
)
def test_the_kernels_themselves(
    kernels: None, float32: None, decay: str, starts: list[int] | None, strong: bool, time: int
) -> None:
    """The strongest decay at most tokens, whose factors would overflow if the kernels took them apart."""
    x = text(decay, time, starts, rows=1, heads=1)
    if strong and x.log_decay is not None:
        x.log_decay[:, :, torch.arange(time) % 3 > 0] = MIN_LOG_DECAY
    if DEVICE.type == "cpu":
        assert_exact(x, 5e-5)
    else:
        assert_as_exact_as_torch(x)


def test_clamped_denominators_have_no_gradient(naive: None, float32: None) -> None:
    x = text("by channel", 70)
    x.k.zero_()
    x.q.abs_()[:, :, :10] = 0
    assert_exact(x, 2e-5, Identity())


@every_decay
def test_bfloat16_is_as_exact_as_torch(naive: None, decay: str) -> None:
    assert_as_exact_as_torch(text(decay, 70, [10]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@every_decay
def test_other_types_are_left_to_torch(decay: str, dtype: torch.dtype) -> None:
    fla, by_torch = (results(text(decay, 70), fla, dtype) for fla in (True, False))
    assert all(map(torch.equal, fla.values(), by_torch.values()))


CHANNEL, HEAD, DELTA = (
    recipe.Attention(kind="linear", decay="channel"),
    recipe.Attention(kind="linear"),
    recipe.Attention(kind="delta"),
)


@pytest.mark.parametrize(
    ("options", "device", "installed", "reason"),
    [
        (HEAD, "cuda", "0.6.0", "decay: channel"),
        (CHANNEL, "cpu", "0.6.0", "needs an NVIDIA GPU, and the device is cpu"),
        (DELTA, "cpu", "0.6.0", "needs an NVIDIA GPU, and the device is cpu"),
        (DELTA, "cuda", "0.5.1", r"fla-core 0\.5\.1 is too old"),
        (CHANNEL, "cuda", "0.6.0", "an even number of values up to 256, and a head has 5"),
    ],
)
def test_why_it_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch, options: recipe.Attention, device: str, installed: str, reason: str
) -> None:
    monkeypatch.setattr(fla_kernels, "version", lambda package: installed)
    attention: Any = build(options)
    why = attention.kernels["fla"].unavailable_reason(attention, torch.device(device))
    assert why is not None and re.search(reason, why)


@pytest.mark.parametrize(
    ("capability", "installed", "reason"),
    [((9, 0), "3.6.0", "Triton 3.7.1"), ((9, 0), "3.7.1+git12", None), ((8, 0), "3.6.0", None)],
)
def test_the_delta_rule_on_an_h100_needs_a_triton_that_compiles_it_correctly(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], installed: str, reason: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(triton, "__version__", installed)
    attention = DeltaAttention(2, 16, 16, Silu(16))
    why = FlaDelta.unavailable_reason(attention, torch.device("cuda"))
    assert why is None if reason is None else reason in str(why)
