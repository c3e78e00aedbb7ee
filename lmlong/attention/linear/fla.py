"""Linear attention with a decay for each channel, by flash-linear-attention.

The library's gated linear attention has no denominators. They are what it computes for values of 1, so values get
another column.

B batch, H heads, T time, F features, V value dim.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from lmlong.attention import fla_kernel
from lmlong.attention.chunks import CHUNK_SIZE
from lmlong.attention.feature_maps import FeatureMap
from lmlong.attention.linear.chunk import ChunkKernel
from lmlong.attention.linear.naive import MIN_DENOMINATOR
from lmlong.attention.scan import ScanInputs, without_autocast

COLUMNS = 16
"""Values are padded to a multiple of this, so that kernels read whole vectors."""


class FlaLinear(ChunkKernel):
    """Computes a text of any length as one operation, or by torch what the library does not compute, and texts of less
    than a chunk, for which the library would compile and time its kernels again."""

    name = "fla"

    @classmethod
    def unavailable_reason(cls, attention: nn.Module, device: torch.device) -> str | None:
        if not getattr(attention, "by_channel", False):
            return "it computes linear attention only with decay: channel"
        return fla_kernel.unavailable_reason(attention, device)

    @staticmethod
    def library(**inputs: Any) -> tuple[Tensor, Tensor]:
        """Return outputs (B, T, H, V) and the state after (B, H, F, V)."""
        from fla.ops.gla import chunk_gla

        return chunk_gla(**inputs)

    def operation(self, features: FeatureMap, state: Tensor, x: ScanInputs) -> tuple[Tensor, Tensor] | None:
        if x.log_decay is None or x.log_decay.ndim < 4 or not fla_kernel.computes(x.v, state):
            return None
        time, values = x.v.shape[2:]
        if time < CHUNK_SIZE:
            return None
        width = (values // COLUMNS + 1) * COLUMNS  # one more column at least
        with without_autocast(state):
            y, after = self.library(
                q=features.query(x.q).to(x.v.dtype).transpose(1, 2),
                k=features.key(x.k).to(x.v.dtype).transpose(1, 2),
                v=pad(x.v.transpose(1, 2), (0, width - values), value=1),
                g=fla_kernel.with_resets(x.log_decay.transpose(1, 2), x.document_starts),
                scale=1.0,
                initial_state=pad(state, (0, width - values - 1)),
                output_final_state=True,
            )
            denominators = y[..., values, None].float().clamp_min(MIN_DENOMINATOR)
            y = (y[..., :values] / denominators).to(x.v.dtype)
        return y.transpose(1, 2), after[..., : values + 1]
