"""The scan of a kernel, called alone, and random inputs for it.

B batch, H heads, T time, F features, K key dim, V value dim.
"""

from collections.abc import Callable, Sequence

import torch
from attention.cases import HEADS
from torch import Tensor

from lmlong.attention.device_policy import CPU_POLICY, DevicePolicy
from lmlong.attention.feature_maps import FeatureMap
from lmlong.attention.scan import Kernel, Scan, ScanInputs

WIDTH, VALUES = 20, 11
"""K and V: not multiples of anything, and different."""


class Identity(FeatureMap):
    """The map of queries and keys that are features already."""

    def __init__(self) -> None:
        super().__init__(0)

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
) -> ScanInputs:
    """Draw inputs in float64, the same for the same length. Documents start at `starts`, in the first row only. `decay`
    is the shape of a token's log decay."""
    draw = torch.Generator().manual_seed(time)

    def normal(*shape: int) -> Tensor:
        return torch.randn(2, HEADS, time, *shape, generator=draw, dtype=torch.float64)

    document_starts = None
    if starts is not None:
        document_starts = torch.zeros(2, time, dtype=torch.bool)
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
