"""The delta rule by flash-linear-attention.

B batch, H heads, T time, F features, V value dim.
"""

from typing import Any

import torch
from torch import Tensor, nn

from lmlong.attention import fla_kernel
from lmlong.attention.delta.chunk import ChunkKernel
from lmlong.attention.feature_maps import FeatureMap
from lmlong.attention.scan import ScanInputs, without_autocast

HOPPER = 9
"""The major compute capability of an H100."""

OLDEST_TRITON = (3, 7, 1)
"""The first release of Triton that compiles the kernel of the gradients correctly for an H100."""


class FlaDelta(ChunkKernel):
    """Computes a text of any length as one operation, or by torch what the library does not compute."""

    name = "fla"

    @classmethod
    def unavailable_reason(cls, attention: nn.Module, device: torch.device) -> str | None:
        if reason := fla_kernel.unavailable_reason(attention, device):
            return reason
        import triton

        hopper = torch.cuda.get_device_capability(device)[0] == HOPPER
        if hopper and fla_kernel.release(triton.__version__) < OLDEST_TRITON:
            return f"gradients on this GPU need Triton 3.7.1 or newer, and {triton.__version__} is installed"
        return None

    @staticmethod
    def library(**inputs: Any) -> tuple[Tensor, Tensor]:
        """Return outputs (B, T, H, V) and the state after (B, H, F, V)."""
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        return chunk_gated_delta_rule(**inputs)

    def operation(self, features: FeatureMap, state: Tensor, x: ScanInputs) -> tuple[Tensor, Tensor] | None:
        if not fla_kernel.computes(x.v, state):
            return None
        assert x.beta is not None
        log_decay = torch.zeros_like(x.beta) if x.log_decay is None else x.log_decay
        with without_autocast(state):
            y, after = self.library(
                q=features.query(x.q).to(x.v.dtype).transpose(1, 2),
                k=features.key(x.k).to(x.v.dtype).transpose(1, 2),
                v=x.v.transpose(1, 2),
                g=fla_kernel.with_resets(log_decay.transpose(1, 2), x.document_starts),
                beta=x.beta.transpose(1, 2),
                scale=1.0,
                initial_state=state,
                output_final_state=True,
            )
        return y.transpose(1, 2), after
