"""Linear attention by definition: as a recurrence over tokens, and as a T x T matrix of weights.

    S_t = g_t S_(t-1) + fk_t v_t^T      z_t = g_t z_(t-1) + fk_t      y_t = fq_t S_t / fq_t . z_t

B batch, H heads, T time, F features, V value dim. `fq` and `fk` are the nonnegative features of queries and keys.
g_t = exp(log_decay_t), a number or a diagonal matrix over features, and 0 at a document start.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lmlong.attention.base import causal_mask

MIN_DENOMINATOR = 1e-30
"""Lower bound of denominators, to avoid division by 0."""


class LinearState(NamedTuple):
    S: Tensor  # (B, H, F, V) sum of fk v^T, float32 or more
    z: Tensor  # (B, H, F)    sum of fk, float32 or more


def quadratic(
    fq: Tensor, fk: Tensor, v: Tensor, document_starts: Tensor | None = None, log_decay: Tensor | None = None
) -> Tensor:
    """Return y_t = sum_(s<=t) w_ts v_s / sum_(s<=t) w_ts, w_ts = (fq_t . fk_s) g_(s+1) ... g_t. Slow; the reference."""
    if log_decay is not None and log_decay.ndim == 4:  # one feature at a time: all at once would be F matrices
        features = zip(fq.split(1, dim=-1), fk.split(1, dim=-1), log_decay.unbind(-1), strict=True)
        weights = sum((q @ k.mT * _decays(gate).to(q.dtype) for q, k, gate in features), torch.zeros(()).to(fq))
    else:
        weights = fq @ fk.mT
        weights = weights if log_decay is None else weights * _decays(log_decay).to(weights.dtype)
    weights = weights.masked_fill(~causal_mask(fq.shape[2], fq.device, document_starts), 0)
    return weights @ v / weights.sum(-1, keepdim=True)


def _decays(log_decay: Tensor) -> Tensor:
    """Return g_(s+1) ... g_t (B, H, T, T) of log decays (B, H, T)."""
    total = log_decay.cumsum(-1)
    return (total[..., :, None] - total[..., None, :]).tril().exp()


def recurrent_step(
    fq: Tensor,
    fk: Tensor,
    v: Tensor,
    state: LinearState,
    document_starts: Tensor | None = None,
    log_decay: Tensor | None = None,
) -> tuple[Tensor, LinearState]:
    """Return the output of one token (T = 1) and the state after it, by the recurrence."""
    dtype = state.S.dtype
    S, z = state
    if log_decay is not None:
        decay = log_decay.to(dtype).exp().squeeze(2) if log_decay.ndim == 4 else log_decay.to(dtype).exp()
        S, z = S * decay[..., None], z * decay  # decay (B, H, F), or (B, H, 1)
    if document_starts is not None:
        reset = document_starts[:, :, None]  # (B, 1, 1)
        S, z = S.masked_fill(reset[..., None], 0), z.masked_fill(reset, 0)
    fq_t, fk_t = fq[:, :, 0].to(dtype), fk[:, :, 0].to(dtype)
    S = S + fk_t[..., :, None] * v.to(dtype)
    z = z + fk_t
    numerator = (fq_t[..., None, :] @ S)[..., 0, :]
    denominator = (fq_t * z).sum(-1, keepdim=True).clamp_min(MIN_DENOMINATOR)
    return (numerator / denominator).to(v.dtype)[:, :, None], LinearState(S, z)
