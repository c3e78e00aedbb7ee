"""Every way to compute the scans of linear attention and the delta rule, called alone, and random inputs for them.

B batch, H heads, T time, F features, K key dim, V value dim.
"""

import copy
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from attention.cases import HEADS
from machine import needs_fla, needs_triton
from torch import Tensor

from lmlong.attention import laws
from lmlong.attention.delta.chunk import ChunkKernel as DeltaChunks
from lmlong.attention.delta.naive import DeltaState, Silu, UnitFeatures, recurrent
from lmlong.attention.delta.native import NativeDelta
from lmlong.attention.device_policy import CPU_POLICY, GPU_POLICY, DevicePolicy
from lmlong.attention.feature_maps import Elu, FeatureMap
from lmlong.attention.fla import FlaDelta, FlaLinear
from lmlong.attention.linear.chunk import ChunkKernel as LinearChunks
from lmlong.attention.linear.naive import LinearState, recurrent_step
from lmlong.attention.linear.native import NativeLinear
from lmlong.attention.linear.triton import TritonLinear
from lmlong.attention.scan import Kernel, Scan, ScanInputs

WIDTH, VALUES = 20, 11
"""K and V: not multiples of anything, and different."""

EXACT = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 4e-2}

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Of the Triton kernels, which run in Triton's interpreter where there is no GPU."""


def interpret_fla() -> None:
    """Let Triton's interpreter, which does not know bfloat16, run flash-linear-attention's kernels in float32, each in
    its first configuration."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a machine without a GPU
        from fla.ops import gated_delta_rule, gla
        from triton.runtime.autotuner import Autotuner

    def in_float32(function: Any) -> Any:
        def call(**inputs: Any) -> tuple[Tensor, Tensor]:
            y, after = function(**{name: x.float() if isinstance(x, Tensor) else x for name, x in inputs.items()})
            return y.to(inputs["v"].dtype), after

        return call

    gla.chunk_gla = in_float32(gla.chunk_gla)
    gated_delta_rule.chunk_gated_delta_rule = in_float32(gated_delta_rule.chunk_gated_delta_rule)

    class Index(int):
        """A loop variable of a kernel, which is an int in the interpreter."""

        def to(self, dtype: Any) -> "Index":
            return self

    def indices(*bounds: Any) -> Iterator[Index]:
        return map(Index, range(*(int(getattr(bound, "value", bound)) for bound in bounds)))

    def run_first(self: Autotuner, *args: Any, **options: Any) -> Any:
        with patch.object(self, "configs", self.configs[:1]):
            return run(self, *args, **options)

    run, Autotuner.run = Autotuner.run, run_first
    for name in ("chunk_h", "chunk_delta_h"):
        vars(sys.modules[f"fla.ops.common.{name}"])["range"] = indices


if find_spec("fla") and find_spec("triton") and DEVICE.type == "cpu":
    interpret_fla()


class Identity(FeatureMap):
    """The map of queries and keys that are features already."""

    def query(self, q: Tensor) -> Tensor:
        return q


def in_dtype(x: ScanInputs, dtype: torch.dtype) -> ScanInputs:
    """Return inputs in a dtype, gates in at least float32."""
    gates = torch.promote_types(dtype, torch.float32)
    log_decay, beta = (None if gate is None else gate.to(gates) for gate in (x.log_decay, x.beta))
    return ScanInputs(x.q.to(dtype), x.k.to(dtype), x.v.to(dtype), x.document_starts, log_decay, beta)


def scan_inputs(
    time: int,
    starts: Sequence[int] | None = None,
    decay: tuple[int, ...] | None = (),
    width: int = WIDTH,
    values: int = VALUES,
    rows: int = 2,
    heads: int = HEADS,
) -> ScanInputs:
    """Draw inputs in float64, the same for the same length. Documents start at `starts`, in the first row only. `decay`
    is the shape of a token's log decay."""
    draw = torch.Generator().manual_seed(time)

    def normal(*shape: int) -> Tensor:
        return torch.randn(rows, heads, time, *shape, generator=draw, dtype=torch.float64)

    document_starts = None
    if starts is not None:
        document_starts = torch.zeros(rows, time, dtype=torch.bool)
        document_starts[0, [start for start in starts if start < time]] = True
    log_decay = None if decay is None else -(normal(*decay) ** 2) / 10
    return ScanInputs(normal(width), normal(width), normal(values), document_starts, log_decay, normal().sigmoid())


def delta_scan(
    kernel: Kernel, features: FeatureMap, x: ScanInputs, S: Tensor, policy: DevicePolicy = CPU_POLICY
) -> tuple[Tensor, Tensor]:
    """Return outputs and the state after."""
    if (done := kernel.operation(features, S, x)) is not None:
        return done
    how = policy, torch.is_grad_enabled()
    return Scan.apply(kernel, features, *how, S, *x, *features.parameters())[:2]


def linear_scan(
    kernel: Kernel, features: FeatureMap, x: ScanInputs, S: Tensor, z: Tensor, policy: DevicePolicy = CPU_POLICY
) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs, S and z."""
    y, state = delta_scan(kernel, features, x._replace(beta=None), torch.cat([S, z[..., None]], dim=-1), policy)
    return y, state[..., :-1].contiguous(), state[..., -1].contiguous()


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


class Way(NamedTuple):
    """A kernel, and the recurrence that it computes with log decays of a shape."""

    engine: str
    kernel: Kernel
    decay: tuple[int, ...] | None = ()
    policy: DevicePolicy = CPU_POLICY

    @property
    def normalizes(self) -> bool:
        return self.kernel.normalizes

    @property
    def features(self) -> FeatureMap:
        return Elu(WIDTH) if self.normalizes else UnitFeatures(Silu(WIDTH))

    @property
    def scan(self) -> Callable[..., Sequence[Tensor]]:
        return partial(linear_scan if self.normalizes else delta_scan, self.kernel, policy=self.policy)

    @property
    def recurrence(self) -> Callable[..., Sequence[Tensor]]:
        return linear_recurrence if self.normalizes else delta_recurrence

    def inputs(self, time: int, starts: Sequence[int] | None = None, **sizes: int) -> ScanInputs:
        """Draw inputs, of one row and head for kernels in Triton's interpreter, which is slow."""
        if self.engine not in ("triton", "fla"):
            return scan_inputs(time, starts, self.decay, **sizes)
        x = scan_inputs(time, starts, self.decay, **{"rows": 1, "heads": 1, **sizes})
        return ScanInputs(*(None if t is None else t.to(DEVICE) for t in x))  # type: ignore[arg-type]

    def state(self, x: ScanInputs, features: FeatureMap) -> list[Tensor]:
        """Draw the state before a text."""
        draw = torch.Generator().manual_seed(1)
        shape = (*x.q.shape[:2], features.features)
        shapes = [(*shape, x.v.shape[-1]), shape] if self.normalizes else [(*shape, x.v.shape[-1])]
        return [torch.rand(size, generator=draw, dtype=torch.float64).to(x.q.device) for size in shapes]

    def results(self, x: ScanInputs, dtype: torch.dtype, features: FeatureMap | None = None) -> dict[str, Tensor]:
        """Return outputs, the state after and all gradients."""
        features = features or self.features
        return outputs_and_gradients(self.scan, features, x, self.state(x, features), dtype)

    def exact(self, x: ScanInputs, features: FeatureMap | None = None) -> dict[str, Tensor]:
        """Return the same by the recurrence in float64."""
        features = copy.deepcopy(features or self.features).double()
        return outputs_and_gradients(self.recurrence, features, x, self.state(x, features), torch.float64)


def _ways() -> Iterator[Way]:
    """One for each kernel and each decay that it computes, or leaves to torch."""
    engines: list[tuple[str, Sequence[Kernel], DevicePolicy]] = [
        ("native", (NativeLinear(), NativeDelta()), CPU_POLICY),
        ("torch", (LinearChunks(), DeltaChunks()), CPU_POLICY),
        ("torch for GPUs", (LinearChunks(), DeltaChunks()), GPU_POLICY),
        ("triton", (TritonLinear(),), CPU_POLICY),
        ("fla", (FlaLinear(), FlaDelta()), CPU_POLICY),
    ]
    for engine, kernels, policy in engines:
        for kernel in kernels:
            for decay in (None, (), (WIDTH,)) if kernel.normalizes else (None, ()):
                yield Way(engine, kernel, decay, policy)


WAYS = list(_ways())
ON_ALL_MACHINES = [way for way in WAYS if way.engine in ("native", "torch", "torch for GPUs")]
DECAYING = [way for way in WAYS if way.decay == ()]


def name(way: Way) -> str:
    decay = {None: "", (): "-decay", (WIDTH,): "-by-channel"}[way.decay]
    return f"{way.engine}-{'linear' if way.normalizes else 'delta'}{decay}"


def each(ways: Sequence[Way]) -> pytest.MarkDecorator:
    """Return a `parametrize` of ways, skipped where their library is not installed."""
    overflow = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of factors that fla's kernels then replace by 0
    marks = {"triton": [needs_triton], "fla": [needs_fla, overflow]}
    points = [pytest.param(way, marks=marks.get(way.engine, ()), id=name(way)) for way in ways]
    return pytest.mark.parametrize("way", points)


def assert_exact(
    way: Way, x: ScanInputs, dtype: torch.dtype = torch.float32, features: FeatureMap | None = None
) -> None:
    """The results in a dtype are those of the recurrence in float64."""
    exact = way.exact(x, features)
    allowed = EXACT[dtype] * (2.5 if way.engine == "fla" else 1)
    beside = 1e-2 if way.engine in ("triton", "fla") else 0  # their gradients of strong decays are about 0
    for name, result in way.results(x, dtype, features).items():
        assert result.isfinite().all(), name
        assert (result - exact[name]).norm() < allowed * ((exact[name].norm() + beside) or 1), name


def assert_as_exact_as_torch(way: Way, x: ScanInputs) -> None:
    """In bfloat16, errors are about those of torch."""
    torchs = way._replace(kernel=LinearChunks() if way.normalizes else DeltaChunks())
    exact, measured, by_torch = way.exact(x), *(each.results(x, torch.bfloat16) for each in (way, torchs))
    allowed = 4 if way.engine == "triton" else 3  # the interpreter truncates digits where a GPU rounds
    for name, truth in exact.items():
        assert laws.error(measured[name], truth) < allowed * max(laws.error(by_torch[name], truth), 1e-6), name


def outputs_and_gradients(
    scan: Callable[..., Sequence[Tensor]],
    features: FeatureMap,
    x: ScanInputs,
    state: Sequence[Tensor],
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Return outputs, the state after, and the gradients of inputs, state and weights through all of them. Sums are in
    at least float32."""
    states = {name: t.to(torch.promote_types(dtype, torch.float32)) for name, t in zip("Sz", state, strict=False)}
    tensors = {**in_dtype(x, dtype)._asdict(), **states}
    leaves = {
        name: t.detach().requires_grad_() for name, t in tensors.items() if t is not None and t.is_floating_point()
    }
    results = scan(
        features,
        ScanInputs(**{name: leaves.get(name, t) for name, t in x._asdict().items()}),
        *(leaves[name] for name in states),
    )
    leaves |= {f"weight {number}": weight for number, weight in enumerate(features.parameters())}
    draw = torch.Generator().manual_seed(0)
    slopes = [torch.randn(t.shape, generator=draw, dtype=torch.float64).to(t) for t in results]
    grads = torch.autograd.grad(results, list(leaves.values()), slopes, materialize_grads=True)
    named = dict(zip(("y", "S after", "z after"), results, strict=False))
    return {**named, **{f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}}
