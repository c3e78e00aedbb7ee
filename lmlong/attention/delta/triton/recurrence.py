"""`chunk.recurrence` by the Triton kernel.

B batch, H heads, F features, V value dim.
"""

import torch
from torch import Tensor
from triton import cdiv, next_power_of_2

from lmlong.attention.delta import chunk
from lmlong.attention.delta.triton.kernel import chunk_recurrence

COLUMNS = 32
"""Columns of the state that a program has."""


def recurrence(
    S: Tensor, decay: Tensor | None, A: Tensor, B: Tensor, C: Tensor, E: Tensor | None, backwards: bool
) -> tuple[Tensor, Tensor]:
    """Run the recurrence by the kernel; by torch in float64."""
    if S.dtype != torch.float32:
        return chunk.recurrence(S, decay, A, B, C, E, backwards)
    chunks, batch, heads, tokens, value_dim = A.shape
    features = B.shape[-1]
    states, X = S.new_empty(chunks + 1, *S.shape), torch.empty_like(A)
    states[-1 if backwards else 0] = S
    each = None if decay is None else decay.expand(chunks, batch, heads, 1, 1).contiguous()
    A, B, C = (x.contiguous() for x in (A, B, C))
    E = None if E is None else E.contiguous()
    blocks = {
        "BLOCK_C": max(16, next_power_of_2(tokens)),
        "BLOCK_F": max(16, next_power_of_2(features)),
        "BLOCK_V": min(COLUMNS, max(16, next_power_of_2(value_dim))),
    }
    chunk_recurrence[(batch * heads, cdiv(value_dim, blocks["BLOCK_V"]))](
        states,
        each,
        A,
        B,
        C,
        E,
        X,
        chunks,
        batch * heads,
        tokens,
        features,
        value_dim,
        DECAYS=each is not None,
        HAS_E=E is not None,
        BACKWARDS=backwards,
        **blocks,
    )
    return states, X
