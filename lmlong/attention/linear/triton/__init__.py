"""Triton kernels of the causal scan: the function of `chunk.scan`, for NVIDIA GPUs.

Triton is imported only when the scan is loaded.
"""

import os
from importlib.util import find_spec

import torch

from lmlong.attention.linear.autograd import Scan


def unavailable_reason(device: torch.device) -> str | None:
    """Return why the kernels cannot run on a device; without a GPU they can in Triton's interpreter, for tests."""
    if find_spec("triton") is None:
        return "triton is not installed; torch for CUDA brings it on Linux"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"its kernels need an NVIDIA GPU, and the device is {device.type}"
    return None


def load_scan() -> Scan:
    """Return the scan by Triton kernels."""
    from lmlong.attention.linear.triton.scan import scan

    return scan
