"""Triton kernels of linear attention, for NVIDIA GPUs. Triton is imported only when they run.

B batch, H heads, T time, F features, V value dim.
"""

import os
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from lmlong.attention.device_policy import DevicePolicy
from lmlong.attention.feature_maps import FeatureMap
from lmlong.attention.linear.chunk import ChunkKernel
from lmlong.attention.scan import Kernel, ScanInputs, Span


class TritonLinear(Kernel):
    """Computes texts of any length as one operation. With a decay for each channel, it computes spans by the recurrence
    over tokens, in float32."""

    name = "triton"
    normalizes = True

    @classmethod
    def unavailable_reason(cls, attention: nn.Module, device: torch.device) -> str | None:
        """Return why the kernels cannot compute an attention on a device, or None. For tests, Triton's interpreter runs
        them without a GPU."""
        if find_spec("triton") is None:
            return "triton is not installed; torch for CUDA brings it on Linux"
        if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            return f"its kernels need an NVIDIA GPU, and the device is {device.type}"
        return None

    def operation(self, features: FeatureMap, state: Tensor, x: ScanInputs) -> tuple[Tensor, Tensor] | None:
        if state.dtype != torch.float32 or (x.log_decay is not None and x.log_decay.ndim == 4):
            return None
        from lmlong.attention.linear.triton.operation import linear_scan

        return linear_scan(features, state, x)

    def suited(self, features: FeatureMap, x: Span, state: Tensor, policy: DevicePolicy) -> Kernel:
        return self if state.dtype == torch.float32 else ChunkKernel(policy)

    def forward(self, x: Span, state: Tensor) -> Tensor:
        from lmlong.attention.linear.triton.channel import recurrence

        after, y, denominators = torch.empty_like(state), _contiguous_like(x.v), state.new_empty(x.v.shape[:3])
        _launch(recurrence, x, state, (state, after, y, denominators, None, None))
        assert x.denominators is not None
        x.y.copy_(y)
        x.denominators.copy_(denominators)
        return after

    def backward(self, x: Span, dx: Span, state: Tensor, dstate: Tensor, dweights: list[Tensor]) -> Tensor:
        from lmlong.attention.linear.triton.channel import recurrence, recurrence_backwards

        assert x.denominators is not None
        of_outputs = x.y.contiguous(), x.denominators.contiguous(), dx.y.contiguous()
        dfq, dfk, dv = (_contiguous_like(part, torch.float32) for part in (x.q, x.k, x.v))
        after, dbefore = torch.empty_like(state), torch.empty_like(dstate)
        _launch(recurrence, x, state, (state, after, *of_outputs, dfq))
        _launch(recurrence_backwards, x, state, (dstate, dbefore, *of_outputs, dfk, dv))
        dx.q.copy_(dfq)
        dx.k.copy_(dfk)
        dx.v.copy_(dv)
        if dx.log_decay is not None:  # as in chunk.py, with the whole span as the chunk
            pairs = x.q * dfq - x.k * dfk
            later = (after * dstate).sum(-1)[:, :, None]
            dx.log_decay.copy_(pairs.flip(2).cumsum(2).flip(2) + later)
        return dbefore


def _launch(kernel: Any, x: Span, state: Tensor, rest: tuple[Tensor | None, ...]) -> None:
    from triton import next_power_of_2

    batch, heads, features, value_dim = *state.shape[:3], state.shape[3] - 1
    starts = None if x.document_starts is None else x.document_starts.to(torch.uint8).contiguous()
    assert x.log_decay is not None
    kernel[(batch * heads,)](
        *(part.contiguous() for part in x[:3]),
        starts,
        x.log_decay.contiguous(),
        *rest,
        x.q.shape[2],
        heads,
        features,
        value_dim,
        BLOCK_F=next_power_of_2(features),
        BLOCK_V=next_power_of_2(value_dim),
    )


def _contiguous_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
