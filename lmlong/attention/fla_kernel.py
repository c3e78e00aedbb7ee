"""What the kernels by flash-linear-attention share: when they can run, and how document starts reach them.

The library (https://github.com/fla-org/flash-linear-attention) has Triton kernels for NVIDIA GPUs. It is imported only
when one of them runs. Its tensors over tokens are (B, T, H, ...), which is the memory layout of the model.

B batch, H heads, T time.
"""

import re
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from lmlong.errors import install_command

PACKAGE, OLDEST = "fla-core", (0, 6)
"""The package with the library's operations, without its models, and its oldest release that is supported."""

MAX_WIDTH = 256
"""Maximum number of features or values of a head."""

DTYPES = (torch.bfloat16,)
"""The dtypes of values that the kernels compute. The library multiplies float32 as TF32, and denominators overflow
float16, so torch computes these."""

RESET = -110.0
"""The log decay of the first token of a document. exp(-110) is 0 in float32, so the state and all earlier keys are
forgotten, while sums of log decays over a chunk stay exact.

The library can also read documents as sequences of their own (`cu_seqlens`). Their chunks then have to be counted, for
which its decay by channel waits for the GPU three times in a layer."""


def unavailable_reason(attention: Any, device: torch.device) -> str | None:
    """Return why the library cannot compute a recurrence on a device, or None."""
    try:
        installed = version(PACKAGE)
    except PackageNotFoundError:
        return f"flash-linear-attention is not installed ({install_command('gpu')})"
    if release(installed) < OLDEST:
        return f"{PACKAGE} {installed} is too old ({install_command('gpu')})"
    if device.type != "cuda":
        return f"flash-linear-attention needs an NVIDIA GPU, and the device is {device.type}"
    for what, width in (("features", attention.feature_map.features), ("values", attention.value_dim)):
        if width > MAX_WIDTH or width % 2:
            return f"it computes an even number of {what} up to {MAX_WIDTH}, and a head has {width}"
    return None


def release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, such as (3, 7, 1)."""
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def computes(x: Tensor, state: Tensor) -> bool:
    """Return whether the kernels compute values x with this state."""
    return x.dtype in DTYPES and state.dtype == torch.float32 and x.shape[-1] <= MAX_WIDTH


def with_resets(log_decay: Tensor, document_starts: Tensor | None) -> Tensor:
    """Return log decays (B, T, H, ...) that forget everything at document starts (B, T)."""
    if document_starts is None:
        return log_decay
    starts = document_starts.bool().reshape(*document_starts.shape, *(1,) * (log_decay.ndim - 2))
    return log_decay.masked_fill(starts, RESET)
