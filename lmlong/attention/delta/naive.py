"""The delta rule by definition, token by token.

    S_t = a_t (I - b_t fk_t fk_t^T) S_(t-1) + b_t fk_t v_t^T      y_t = S_t^T fq_t

B batch, H heads, T time, F features, V value dim. `fq` and `fk` are features of queries and keys, of length one.
a_t = exp(log_decay_t), and 0 at a document start; b_t = beta_t. The value stored under a unit key is S^T fk: a fraction
b of it is removed, and the same fraction of the new value is added.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class DeltaState(NamedTuple):
    S: Tensor  # (B, H, F, V), float32 or more


def recurrent(
    fq: Tensor,
    fk: Tensor,
    v: Tensor,
    beta: Tensor,
    state: DeltaState,
    document_starts: Tensor | None = None,
    log_decay: Tensor | None = None,
) -> tuple[Tensor, DeltaState]:
    """Return outputs (B, H, T, V) and the state after them. Slow; used as the reference and to decode one token."""
    S, outputs = state.S, []
    for t in range(fq.shape[2]):
        query, key, value, b = (x[:, :, t].to(S.dtype) for x in (fq, fk, v, beta))
        if log_decay is not None:
            S = S * log_decay[:, :, t, None, None].to(S.dtype).exp()
        if document_starts is not None:
            S = S.masked_fill(document_starts[:, t, None, None, None].bool(), 0)
        change = b[..., None] * (value - (key[..., None, :] @ S)[..., 0, :])
        S = S + key[..., :, None] * change[..., None, :]
        outputs.append((query[..., None, :] @ S)[..., 0, :])
    y = torch.stack(outputs, dim=2) if outputs else v
    return y.to(v.dtype), DeltaState(S)
