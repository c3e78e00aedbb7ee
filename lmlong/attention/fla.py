"""The delta rule, and linear attention with a decay for each channel, by flash-linear-attention.

The library (https://github.com/fla-org/flash-linear-attention) has Triton kernels for NVIDIA GPUs. It is imported only
when one of them runs. Its tensors over tokens are (B, T, H, ...), which is the memory layout of the model.

B batch, H heads, T time, F features, V value dim.
"""

import re
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from lmlong.attention.chunks import CHUNK_SIZE
from lmlong.attention.delta.chunk import ChunkKernel as DeltaChunks
from lmlong.attention.feature_maps import FeatureMap
from lmlong.attention.linear.chunk import ChunkKernel as LinearChunks
from lmlong.attention.linear.naive import MIN_DENOMINATOR
from lmlong.attention.scan import ScanInputs, without_autocast
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

HOPPER = 9
"""The major compute capability of an H100."""

OLDEST_TRITON = (3, 7, 1)
"""The first release of Triton that compiles the delta rule's gradients correctly for an H100."""

COLUMNS = 16
"""Values of linear attention are padded to a multiple of this, so that kernels read whole vectors."""


class FlaDelta(DeltaChunks):
    """Computes a text of any length as one operation, or by torch what the library does not compute."""

    name = "fla"

    @classmethod
    def unavailable_reason(cls, attention: nn.Module, device: torch.device) -> str | None:
        if reason := no_library(attention, device):
            return reason
        import triton

        hopper = torch.cuda.get_device_capability(device)[0] == HOPPER
        if hopper and release(triton.__version__) < OLDEST_TRITON:
            return f"gradients on this GPU need Triton 3.7.1 or newer, and {triton.__version__} is installed"
        return None

    @staticmethod
    def library(**inputs: Any) -> tuple[Tensor, Tensor]:
        """Return outputs (B, T, H, V) and the state after (B, H, F, V)."""
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        return chunk_gated_delta_rule(**inputs)

    def operation(self, features: FeatureMap, state: Tensor, x: ScanInputs) -> tuple[Tensor, Tensor] | None:
        if not computes(x.v, state):
            return None
        assert x.beta is not None
        log_decay = torch.zeros_like(x.beta) if x.log_decay is None else x.log_decay
        with without_autocast(state):
            y, after = self.library(
                **library_inputs(features, x, log_decay),
                v=x.v.transpose(1, 2),
                beta=x.beta.transpose(1, 2),
                initial_state=state,
            )
        return y.transpose(1, 2), after


class FlaLinear(LinearChunks):
    """Computes a text of any length as one operation, or by torch what the library does not compute, and texts of less
    than a chunk, for which the library would compile and time its kernels again.

    The library's gated linear attention has no denominators. They are what it computes for values of 1, so values get
    another column."""

    name = "fla"

    @classmethod
    def unavailable_reason(cls, attention: nn.Module, device: torch.device) -> str | None:
        if not getattr(attention, "by_channel", False):
            return "it computes linear attention only with decay: channel"
        return no_library(attention, device)

    @staticmethod
    def library(**inputs: Any) -> tuple[Tensor, Tensor]:
        """Return outputs (B, T, H, V) and the state after (B, H, F, V)."""
        from fla.ops.gla import chunk_gla

        return chunk_gla(**inputs)

    def operation(self, features: FeatureMap, state: Tensor, x: ScanInputs) -> tuple[Tensor, Tensor] | None:
        if x.log_decay is None or x.log_decay.ndim < 4 or not computes(x.v, state):
            return None
        time, values = x.v.shape[2:]
        if time < CHUNK_SIZE:
            return None
        width = (values // COLUMNS + 1) * COLUMNS  # one more column at least
        with without_autocast(state):
            y, after = self.library(
                **library_inputs(features, x, x.log_decay),
                v=pad(x.v.transpose(1, 2), (0, width - values), value=1),
                initial_state=pad(state, (0, width - values - 1)),
            )
            denominators = y[..., values, None].float().clamp_min(MIN_DENOMINATOR)
            y = (y[..., :values] / denominators).to(x.v.dtype)
        return y.transpose(1, 2), after[..., : values + 1]


def no_library(attention: Any, device: torch.device) -> str | None:
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


def library_inputs(features: FeatureMap, x: ScanInputs, log_decay: Tensor) -> dict[str, Any]:
    """Return the inputs that do not depend on the recurrence: queries, keys, gates that forget everything at document
    starts, and options."""
    gates = log_decay.transpose(1, 2)
    if x.document_starts is not None:
        starts = x.document_starts.bool().reshape(*x.document_starts.shape, *(1,) * (gates.ndim - 2))
        gates = gates.masked_fill(starts, RESET)
    return {
        "q": features.query(x.q).to(x.v.dtype).transpose(1, 2),
        "k": features.key(x.k).to(x.v.dtype).transpose(1, 2),
        "g": gates,
        "scale": 1.0,
        "output_final_state": True,
    }
