"""The scan of a recurrence by native code on a CPU: a span at a time, heads and rows divided among the threads.

Each recurrence has C++ of its own, in its folder `native`; the arguments, and how they are handed over, are shared.

B batch, H heads, T time, F features, V value dim.
"""

import ctypes
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from lmlong.attention.base import at_least_float32
from lmlong.attention.chunks import MIN_LOG2_DECAY
from lmlong.attention.feature_maps import ELU_FLOOR, Relu
from lmlong.attention.scan import FeatureVjp, QKFeatures, SavedSpan, ScanGrads, ScanInputs, ScanOutputs
from lmlong.native.build import Shared, compiled
from lmlong.native.feature_maps import FeatureMap
from lmlong.native.threads import run_on_threads

CONSTANTS = {"MIN_LOG2_DECAY": MIN_LOG2_DECAY, "ELU_FLOOR": ELU_FLOOR, "RELU_FLOOR": Relu.FLOOR}
"""Those of the shared headers."""

DTYPES = (torch.float32, torch.bfloat16)


class StridedTensor(ctypes.Structure):
    """A tensor by its address and strides; its fields are explained in scan_job.h."""

    _fields_ = (("data", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("row", "head", "token", "bfloat16")))


class ScanJob(ctypes.Structure):
    """The arguments of a scan; its fields are explained in scan_job.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("lines", "heads", "time", "head_dim", "features", "value_dim")),
        *((name, ctypes.c_int64) for name in ("feature_map", "channel_decay")),
        *((name, StridedTensor) for name in ("q", "k", "v", "document_starts", "log_decay", "beta")),
        *((name, StridedTensor) for name in ("y", "denominators", "dy", "dq", "dk", "dv", "dlog_decay", "dbeta")),
        *((name, ctypes.c_void_p) for name in ("state_before", "state_after", "dstate_before", "dstate_after")),
        *((name, ctypes.c_void_p) for name in ("projection", "projection_T", "favor_constants", "dscale", "scratch")),
        *((name, ctypes.c_int64) for name in ("scratch_size", "workers_begun", "lines_begun")),
    )


class Library:
    """The compiled scan's functions."""

    def __init__(self, functions: ctypes.CDLL):
        self._functions = functions
        self.scratch_size = functions.scratch_size
        self.scratch_size.argtypes = [ctypes.POINTER(ScanJob)]
        self.scratch_size.restype = ctypes.c_int64

    def run(self, name: str, job: ScanJob, workers: int) -> None:
        """Run a job, its heads and rows divided among `workers` threads."""
        run_on_threads(self._functions[name], job, workers)


PADDED_TO = 16
"""What sizes of matrices are padded to multiples of: TILE of simd.h."""


def load_library(folder: Path, what: str, constants: Mapping[str, float]) -> Library | None:
    """Return the library, compiled at its first use on a machine; None where it cannot be."""
    structures, integers = [StridedTensor, ScanJob], {"PADDED_TO": PADDED_TO}
    shared = Shared({**CONSTANTS, **constants}, [FeatureMap], structures, integers)
    functions = compiled(folder, shared, f"{what} is computed by torch, slower")
    return Library(functions) if functions else None


def as_native(inputs: ScanInputs, state: Tensor) -> ScanInputs | None:
    """Return inputs in the dtypes that native code reads as memory; None where it is not for them."""
    document_starts, *gates = inputs[3:]
    if state.device.type != "cpu" or state.dtype != torch.float32 or any(x.dtype not in DTYPES for x in inputs[:3]):
        return None
    log_decay, beta = (None if gate is None else gate.to(at_least_float32(state.dtype)) for gate in gates)
    starts = None if document_starts is None else document_starts.bool()
    return inputs._replace(document_starts=starts, log_decay=log_decay, beta=beta)


class FusedFeatures(NamedTuple):
    """A feature map that native code computes."""

    feature_map: FeatureMap
    weights: Mapping[str, Tensor] = MappingProxyType({})
    """By their fields of a job."""
    add_grads: Callable[[Tensor, list[Tensor]], None] | None = None
    """Adds to the gradients of its parameters what `dscale` (lines,) says."""


class NativeKernel:
    """The computation of a span by native code, with features that are `fused` into it, or computed by torch."""

    def __init__(self, library: Library, fused: FusedFeatures | None, has_denominators: bool = False):
        self._library, self._fused, self.has_denominators = library, fused, has_denominators

    def forward(self, features: QKFeatures, inputs: ScanInputs, state: Tensor, out: ScanOutputs) -> Tensor:
        if self._fused is None:
            inputs = inputs._replace(q=features.query(inputs.q), k=features.key(inputs.k))
        state_after = new_contiguous(state)
        self._run("scan_forward", inputs, out, state, state_after=state_after)
        return state_after

    def backward(self, features: QKFeatures, weights: list[Tensor], saved: SavedSpan, out: ScanGrads) -> Tensor:
        inputs, outputs, state, dy, dstate = saved
        dq, dk, dv, _, dlog_decay, dbeta = out.inputs
        vjp = None
        if self._fused is None:
            vjp = FeatureVjp(features, weights, inputs.q, inputs.k)
            inputs = inputs._replace(q=vjp.fq, k=vjp.fk)
            dq, dk = new_contiguous(vjp.fq), new_contiguous(vjp.fk)
        dstate_before = new_contiguous(dstate)
        grads = {"dy": dy, "dq": dq, "dk": dk, "dv": dv, "dlog_decay": dlog_decay, "dbeta": dbeta}
        states = {"dstate_after": dstate, "dstate_before": dstate_before}
        dscale = None
        if self._fused and self._fused.add_grads:
            dscale = dstate.new_empty(inputs.q.shape[:2])
        self._run("scan_backward", inputs, outputs, state, **grads, **states, dscale=dscale)
        if self._fused and self._fused.add_grads and dscale is not None:
            self._fused.add_grads(dscale, out.weights)
        if vjp:
            for into, grad in zip(out.inputs[:2], vjp.backward(dq, dk, out.weights), strict=True):
                into.copy_(grad)
        return dstate_before

    def _run(
        self,
        name: str,
        inputs: ScanInputs,
        outputs: ScanOutputs,
        state: Tensor,
        **others: Tensor | None,
    ) -> None:
        batch, heads, time, head_dim = inputs.q.shape
        fused = self._fused or FusedFeatures(FeatureMap.IDENTITY)
        job = ScanJob(batch * heads, heads, time, head_dim, state.shape[2], inputs.v.shape[3], fused.feature_map)
        job.channel_decay = inputs.log_decay is not None and inputs.log_decay.ndim == 4
        job.scratch_size = self._library.scratch_size(job)
        workers = max(1, min(torch.get_num_threads(), batch * heads))  # one where there is nothing to do
        scratch = state.new_empty(workers, job.scratch_size)
        tensors = {**inputs._asdict(), **outputs._asdict(), **others, **fused.weights, "state_before": state}
        tensors["scratch"] = scratch
        # `held` keeps copies alive while the job reads them
        held = {name: _in_layout(name, x) for name, x in tensors.items() if x is not None}
        assert all(held[name] is tensors[name] for name in WRITTEN & held.keys()), "an output would be lost in a copy"
        for field, x in held.items():
            setattr(job, field, x.data_ptr() if field in POINTERS else _strided(x))
        self._library.run(name, job, workers)


POINTERS = {field[0] for field in ScanJob._fields_ if field[1] is ctypes.c_void_p}
"""Fields of a job that are plain addresses, of contiguous tensors."""


WRITTEN = {"y", "denominators", "state_after", "dstate_before", "dq", "dk", "dv", "dlog_decay", "dbeta", "dscale"}
"""Fields of a job that it writes to, unless it only reads them, in the backward pass."""


def new_contiguous(like: Tensor) -> Tensor:
    """Return an empty contiguous tensor: `empty_like` alone keeps the layout of a transposed one."""
    return torch.empty_like(like, memory_format=torch.contiguous_format)


def _in_layout(field: str, x: Tensor) -> Tensor:
    """Return x as a job reads it, copied where needed: contiguous behind a plain address, else each token."""
    if field in POINTERS:
        return x.contiguous()
    return x if x.ndim < 4 or x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _strided(x: Tensor) -> StridedTensor:
    """Describe (B, H, T, ...), or document starts (B, T)."""
    row, head, token = (x.stride(0), 0, x.stride(1)) if x.ndim == 2 else x.stride()[:3]
    return StridedTensor(x.data_ptr(), row, head, token, x.dtype == torch.bfloat16)
