"""Triton kernels of the causal scan: the function of `spans.attend`, made for NVIDIA GPUs.

Triton is imported only when they are asked for.
"""

import os
from importlib.util import find_spec

import torch

from lmlong.attention.spans import Attend


def obstacle(device: torch.device) -> str | None:
    """Why the kernels cannot run there; without a GPU they do in Triton's interpreter, which is for tests."""
    if find_spec("triton") is None:
        return "triton is not installed; torch for CUDA brings it on Linux"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"its kernels need an NVIDIA GPU, and the device is {device.type}"
    return None


def load() -> Attend:
    """The scan by kernels."""
    from lmlong.attention.kernels.attend import attend

    return attend
