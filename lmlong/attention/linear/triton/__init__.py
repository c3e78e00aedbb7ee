"""Triton kernels of linear attention, for NVIDIA GPUs. Triton is imported only when they run."""

import os
from importlib.util import find_spec

import torch
from torch import Tensor

from lmlong.attention.feature_maps import FeatureMap
from lmlong.attention.linear.chunk import ChunkKernel
from lmlong.attention.scan import ScanInputs


def unavailable_reason(device: torch.device) -> str | None:
    """Return why the kernels cannot run on a device, or None. For tests, Triton's interpreter runs them without a
    GPU."""
    if find_spec("triton") is None:
        return "triton is not installed; torch for CUDA brings it on Linux"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"its kernels need an NVIDIA GPU, and the device is {device.type}"
    return None


class TritonLinear(ChunkKernel):
    """Computes a text of any length as one operation, or by torch with a decay for each channel or a state in
    float64."""

    name = "triton"

    def operation(self, features: FeatureMap, state: Tensor, x: ScanInputs) -> tuple[Tensor, Tensor] | None:
        if state.dtype != torch.float32 or (x.log_decay is not None and x.log_decay.ndim == 4):
            return None
        from lmlong.attention.linear.triton.operation import linear_scan

        return linear_scan(features, state, x)
