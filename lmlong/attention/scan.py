"""The causal scan over S and z: by spans for many tokens, in one step for one, and the definition both must equal.

    S_t = g_t S_(t-1) + fk_t v_t^T      z_t = g_t z_(t-1) + fk_t      y_t = fq_t S_t / fq_t . z_t

B batch, H heads, T time, F features, E value width. `fq` and `fk` are queries and keys
after their feature map, not negative; g_t = exp(log_decay_t), and 0 where a document starts.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lmlong.attention.chunked import Chunked
from lmlong.attention.native.engine import attend
from lmlong.attention.spans import SMALLEST, Attend, Features, Given, Inputs, attended


class ScanState(NamedTuple):
    S: Tensor  # (B, H, F, E) sum of fk v^T, float32 or more
    z: Tensor  # (B, H, F)    sum of fk, float32 or more


def quadratic(
    fq: Tensor, fk: Tensor, v: Tensor, starts: Tensor | None = None, log_decay: Tensor | None = None
) -> Tensor:
    """The definition: y_t = sum_s<=t w_ts v_s / sum_s<=t w_ts, w_ts = (fq_t . fk_s) g_s+1 ... g_t. Slow; the oracle."""
    time = fq.shape[2]
    weights = fq @ fk.mT
    if log_decay is not None:
        total = log_decay.cumsum(-1)
        weights = weights * (total[..., :, None] - total[..., None, :]).tril().exp().to(weights.dtype)
    reach = torch.ones(time, time, dtype=torch.bool, device=fq.device).tril()
    if starts is not None:
        document = starts.cumsum(1)
        reach = reach & (document[:, None, :, None] == document[:, None, None, :])
    weights = weights.masked_fill(~reach, 0)
    return weights @ v / weights.sum(-1, keepdim=True)


def step(
    fq: Tensor,
    fk: Tensor,
    v: Tensor,
    state: ScanState,
    starts: Tensor | None = None,
    log_decay: Tensor | None = None,
) -> tuple[Tensor, ScanState]:
    """One token (T = 1) by the recurrence itself."""
    precise = state.S.dtype
    S, z = state
    if log_decay is not None:
        keep = log_decay.to(precise).exp()  # (B, H, 1)
        S, z = S * keep[..., None], z * keep
    if starts is not None:
        forget = starts[:, :, None]  # (B, 1, 1)
        S, z = S.masked_fill(forget[..., None], 0), z.masked_fill(forget, 0)
    fq_now, fk_now = fq[:, :, 0].to(precise), fk[:, :, 0].to(precise)
    S = S + fk_now[..., :, None] * v.to(precise)
    z = z + fk_now
    numerator = (fq_now[..., None, :] @ S)[..., 0, :]
    denominator = (fq_now * z).sum(-1, keepdim=True).clamp_min(SMALLEST)
    return (numerator / denominator).to(v.dtype)[:, :, None], ScanState(S, z)


def prefill(
    fq: Tensor,
    fk: Tensor,
    v: Tensor,
    state: ScanState,
    starts: Tensor | None = None,
    log_decay: Tensor | None = None,
    features: Features | None = None,
    by: Attend = attend,
) -> tuple[Tensor, ScanState]:
    """Any number of tokens: what folding `step` over them gives, in products of matrices.

    Given `features`, `fq` and `fk` are queries and keys before their map, and no more than these is kept of them.
    """
    y, S, z = by(features or Given(), Inputs(fq, fk, v, starts, log_decay), *state)
    return y, ScanState(S, z)


def denominators(
    fq: Tensor,
    fk: Tensor,
    v: Tensor,
    state: ScanState,
    starts: Tensor | None = None,
    log_decay: Tensor | None = None,
) -> Tensor:
    """What `prefill` divides by, (B, H, T): the sum of all weights, which must not come near 0; without a gradient."""
    outputs, _, _ = attended(Chunked(), Given(), Inputs(fq, fk, v, starts, log_decay), *state)
    return outputs.denominators
