"""Triton kernels of linear attention, for NVIDIA GPUs. Triton is imported only when they run."""

import os
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from lmlong.attention.feature_maps import FeatureMap
from lmlong.attention.linear.chunk import ChunkKernel
from lmlong.attention.scan import ScanInputs

OLDEST = (8, 0)
"""The lowest compute capability of a GPU: the first with tensor cores for bfloat16 and TF32."""


class TritonLinear(ChunkKernel):
    """Computes a text of any length as one operation, for any number of features and values. A decay by channel and
    states in float64 are left to torch."""

    name = "triton"

    @classmethod
    def unavailable_reason(cls, attention: nn.Module, device: torch.device) -> str | None:
        recurrence: Any = attention
        if recurrence.by_channel:
            return "it does not compute decay: channel"
        if recurrence.state_dtype != torch.float32:
            return f"it computes states in float32, not in {str(recurrence.state_dtype).removeprefix('torch.')}"
        if find_spec("triton") is None:
            return "triton is not installed; torch for CUDA brings it on Linux"
        if os.environ.get("TRITON_INTERPRET") == "1":
            return None  # for tests: Triton's interpreter needs no GPU
        if device.type != "cuda" or torch.version.hip:
            by = " by ROCm" if torch.version.hip else ""
            return f"its kernels need an NVIDIA GPU, and the device is {device.type}{by}"
        capability = torch.cuda.get_device_capability(device)
        if capability < OLDEST:
            return f"its kernels need compute capability {_dotted(OLDEST)}, and the GPU has {_dotted(capability)}"
        return None

    def operation(self, features: FeatureMap, state: Tensor, x: ScanInputs) -> tuple[Tensor, Tensor] | None:
        if state.dtype != torch.float32 or (x.log_decay is not None and x.log_decay.ndim == 4):
            return None
        from lmlong.attention.linear.triton.operation import linear_scan

        return linear_scan(features, state, x)


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
