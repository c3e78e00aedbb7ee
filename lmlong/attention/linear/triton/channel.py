"""A span of linear attention with a decay for each channel, by the Triton kernels of its recurrence.

B batch, H heads, T time, F features, V value dim.
"""

from typing import Any

import torch
from torch import Tensor
from triton import next_power_of_2

from lmlong.attention.linear.triton.channel_kernels import recurrence, recurrence_backwards
from lmlong.attention.scan import FeatureVjp, QKFeatures, SavedSpan, ScanGrads, ScanInputs, ScanOutputs


class ChannelKernel:
    """Features are computed by torch, and all sums over them by the kernels, in float32."""

    has_denominators = True

    def forward(self, features: QKFeatures, inputs: ScanInputs, state: Tensor, out: ScanOutputs) -> Tensor:
        after, y = torch.empty_like(state), _empty(out.y)
        assert out.denominators is not None
        denominators = _empty(out.denominators)
        of_tokens = _contiguous(inputs._replace(q=features.query(inputs.q), k=features.key(inputs.k)))
        _launch(recurrence, state, of_tokens, (state.contiguous(), after, y, denominators, None, None))
        out.y.copy_(y)
        out.denominators.copy_(denominators)
        return after

    def backward(self, features: QKFeatures, weights: list[Tensor], saved: SavedSpan, out: ScanGrads) -> Tensor:
        inputs, outputs, state, dy, dstate = saved
        vjp = FeatureVjp(features, weights, inputs.q, inputs.k)
        of_tokens = _contiguous(inputs._replace(q=vjp.fq, k=vjp.fk))
        assert outputs.denominators is not None
        of_outputs = outputs.y.contiguous(), outputs.denominators.contiguous(), dy.contiguous()
        dfq, dfk, dv = (_empty(x, torch.float32) for x in (vjp.fq, vjp.fk, inputs.v))
        after, dbefore = torch.empty_like(state), torch.empty_like(dstate)
        _launch(recurrence, state, of_tokens, (state.contiguous(), after, *of_outputs, dfq))
        _launch(recurrence_backwards, state, of_tokens, (dstate.contiguous(), dbefore, *of_outputs, dfk, dv))
        dq, dk = vjp.backward(dfq.to(vjp.fq.dtype), dfk.to(vjp.fk.dtype), out.weights)
        for into, grad in zip(out.inputs[:3], (dq, dk, dv), strict=True):
            assert into is not None and grad is not None
            into.copy_(grad)
        if out.inputs.log_decay is not None:  # as in chunk.py, with the whole span for a chunk
            pairs = vjp.fq * dfq - vjp.fk * dfk
            later = (after * dstate).sum(-1)[:, :, None]
            out.inputs.log_decay.copy_(pairs.flip(2).cumsum(2).flip(2) + later)
        return dbefore


def _launch(kernel: Any, state: Tensor, inputs: ScanInputs, others: tuple[Tensor | None, ...]) -> None:
    batch, heads, features, value_dim = *state.shape[:3], state.shape[3] - 1
    kernel[(batch * heads,)](
        *inputs[:5],
        *others,
        inputs.q.shape[2],
        heads,
        features,
        value_dim,
        BLOCK_F=next_power_of_2(features),
        BLOCK_V=next_power_of_2(value_dim),
    )


def _contiguous(inputs: ScanInputs) -> ScanInputs:
    starts = None if inputs.document_starts is None else inputs.document_starts.to(torch.uint8).contiguous()
    q, k, v = (x.contiguous() for x in inputs[:3])
    assert inputs.log_decay is not None
    return ScanInputs(q, k, v, starts, inputs.log_decay.contiguous())


def _empty(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format)
