"""The delta rule with a Triton kernel for the recurrence over chunks, for NVIDIA GPUs; torch computes the rest.

B batch, H heads, F features, V value dim.
"""

import torch
from torch import Tensor

from lmlong.attention.delta.chunk import ChunkKernel

COLUMNS = 32
"""Columns of the state that one program computes."""


class TritonDelta(ChunkKernel):
    """Computes the states of all chunks with one kernel, or with torch in float64."""

    name = "triton"

    def recurrence(
        self, S: Tensor, decay: Tensor | None, A: Tensor, B: Tensor, C: Tensor, E: Tensor | None, backwards: bool
    ) -> tuple[Tensor, Tensor]:
        if S.dtype != torch.float32:
            return super().recurrence(S, decay, A, B, C, E, backwards)
        from triton import cdiv, next_power_of_2  # imported here because not every machine has it

        from lmlong.attention.delta.triton.kernel import chunk_recurrence

        chunks, batch, heads, tokens, value_dim = A.shape
        features = B.shape[-1]
        states, X = S.new_empty(chunks + 1, *S.shape), torch.empty_like(A)
        states[-1 if backwards else 0] = S
        each = None if decay is None else decay.expand(chunks, batch, heads, 1, 1).contiguous()
        tensors = (states, each, A.contiguous(), B.contiguous(), C.contiguous(), None if E is None else E.contiguous())
        sizes = (chunks, batch * heads, tokens, features, value_dim)
        columns = min(COLUMNS, max(16, next_power_of_2(value_dim)))
        chunk_recurrence[(batch * heads, cdiv(value_dim, columns))](
            *tensors,
            X,
            *sizes,
            BACKWARDS=backwards,
            BLOCK_C=max(16, next_power_of_2(tokens)),
            BLOCK_F=max(16, next_power_of_2(features)),
            BLOCK_V=columns,
        )
        return states, X
