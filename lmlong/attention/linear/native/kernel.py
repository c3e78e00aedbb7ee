"""The linear attention scan by native code on a CPU: a span at a time, heads and rows divided among the threads.

B batch, H heads, T time, F features, V value dim.
"""

import torch
from torch import Tensor

from lmlong.attention.base import at_least_float32
from lmlong.attention.feature_maps import Elu, Relu
from lmlong.attention.linear import autograd, chunk
from lmlong.attention.linear.autograd import (
    FeatureVjp,
    IdentityFeatures,
    QKFeatures,
    SavedSpan,
    ScanGrads,
    ScanInputs,
    ScanOutputs,
)
from lmlong.attention.linear.native.library import Library, ScanJob, StridedTensor, library
from lmlong.native.feature_maps import FeatureMap

FUSED = {IdentityFeatures: FeatureMap.IDENTITY, Elu: FeatureMap.ELU, Relu: FeatureMap.RELU}
"""Feature maps that native code computes; torch computes all others."""

DTYPES = (torch.float32, torch.bfloat16)


def scan(features: QKFeatures, inputs: ScanInputs, S: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Run the scan by native code, or by `chunk.scan` for other devices and dtypes and without a compiler."""
    document_starts, log_decay = inputs.document_starts, inputs.log_decay
    inputs = inputs._replace(  # native code reads them as memory, whatever they are
        document_starts=None if document_starts is None else document_starts.bool(),
        log_decay=None if log_decay is None else log_decay.to(at_least_float32(S.dtype)),
    )
    fits = S.device.type == "cpu" and S.dtype == torch.float32 and all(x.dtype in DTYPES for x in inputs[:3])
    if fits and (compiled := library()):
        return autograd.scan(NativeKernel(compiled), features, inputs, S, z)
    return chunk.scan(features, inputs, S, z)


class NativeKernel:
    """The computation of a span by native code."""

    def __init__(self, compiled: Library):
        self._compiled = compiled

    def forward(self, features: QKFeatures, inputs: ScanInputs, state: Tensor, out: ScanOutputs) -> Tensor:
        if not _fused(features):
            inputs = inputs._replace(q=features.query(inputs.q), k=features.key(inputs.k))
        state_after = torch.empty_like(state)
        self._run("scan_forward", features, inputs, out, state, state_after=state_after)
        return state_after

    def backward(self, features: QKFeatures, weights: list[Tensor], saved: SavedSpan, out: ScanGrads) -> Tensor:
        inputs, outputs, state, dy, dstate = saved
        dq, dk, dv, _, dlog_decay = out.inputs
        vjp = None
        if not _fused(features):
            vjp = FeatureVjp(features, weights, inputs.q, inputs.k)
            inputs = inputs._replace(q=vjp.fq, k=vjp.fk)
            dq, dk = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (vjp.fq, vjp.fk))
        dstate_before = torch.empty_like(dstate)
        grads = {"dy": dy, "dq": dq, "dk": dk, "dv": dv, "dlog_decay": dlog_decay}
        states = {"dstate_after": dstate, "dstate_before": dstate_before}
        self._run("scan_backward", features, inputs, outputs, state, **grads, **states)
        if vjp:
            for into, grad in zip(out.inputs[:2], vjp.backward(dq, dk, out.weights), strict=True):
                into.copy_(grad)
        return dstate_before

    def _run(
        self,
        name: str,
        features: QKFeatures,
        inputs: ScanInputs,
        outputs: ScanOutputs,
        state: Tensor,
        **others: Tensor | None,
    ) -> None:
        batch, heads, time = inputs.q.shape[:3]
        dims = state.shape[2], state.shape[3] - 1
        workers = max(1, min(torch.get_num_threads(), batch * heads))  # one where there is nothing to do
        scratch = state.new_empty(workers, self._compiled.scratch_size(time, *dims))
        job = ScanJob(batch * heads, heads, time, *dims, FUSED.get(type(features), 0))
        job.scratch_size = scratch.shape[1]
        tensors = {**inputs._asdict(), **outputs._asdict(), **others, "state_before": state, "scratch": scratch}
        # `held` keeps copies alive while the job reads them
        held = {name: _token_contiguous(x) for name, x in tensors.items() if x is not None}
        for field, x in held.items():
            setattr(job, field, x.data_ptr() if field in POINTERS else _strided(x))
        self._compiled.run(name, job, workers)


POINTERS = {"state_before", "state_after", "dstate_before", "dstate_after", "scratch"}
"""Fields of a job that are plain addresses, of contiguous tensors."""


def _fused(features: QKFeatures) -> bool:
    return type(features) in FUSED


def _token_contiguous(x: Tensor) -> Tensor:
    """Return x, copied if the numbers of a token are not contiguous."""
    return x if x.ndim < 4 or x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _strided(x: Tensor) -> StridedTensor:
    """Describe (B, H, T, ...), or document starts (B, T)."""
    row, head, token = (x.stride(0), 0, x.stride(1)) if x.ndim == 2 else x.stride()[:3]
    return StridedTensor(x.data_ptr(), row, head, token, x.dtype == torch.bfloat16)
