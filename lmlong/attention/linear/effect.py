"""The effect of some tokens on the state of linear attention, for any state before them.

    S' = r S + sum_t u_t fk_t [v_t, 1]^T,  u_t = g_(t+1) ... g_T,  r = g_1 ... g_T

u_t is 0 for tokens before the last document start, and r is 0 if a document starts. With a decay for each channel, u
and r have a value for each feature. Nothing is read within the tokens, so no scan is needed.

N chunks, B batch, H heads, C tokens in a chunk, T time, F features, V value dim.
"""

from functools import reduce
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from lmlong.attention.chunks import to_chunks
from lmlong.attention.device_policy import DevicePolicy
from lmlong.attention.feature_maps import FeatureMap
from lmlong.attention.scan import recomputed, span_tokens, without_autocast


class LinearEffect(NamedTuple):
    """What tokens do to a packed state, in the dtype of states."""

    transition: Tensor  # (B, H, 1), or (B, H, F) by channel: r
    added: Tensor  # (B, H, F, V + 1)

    def on(self, packed: Tensor) -> Tensor:
        """Return the packed state (B, H, F, V + 1) after the tokens, given the one before them."""
        return packed * self.transition[..., None].to(packed.dtype) + self.added.to(packed.dtype)

    def then(self, later: "LinearEffect") -> "LinearEffect":
        """Return the effect of these tokens followed by others."""
        return LinearEffect(self.transition * later.transition, later.on(self.added))


def linear_effect(
    feature_map: FeatureMap,
    k: Tensor,
    v: Tensor,
    document_starts: Tensor | None,
    log_decay: Tensor | None,
    dtype: torch.dtype,
    policy: DevicePolicy,
) -> LinearEffect:
    """Return the effect of tokens on states in `dtype`, computed from as many tokens at once as the memory for
    temporary tensors allows. Autograd keeps only the inputs, and the rest is computed again for the gradients."""
    by_channel = log_decay is not None and log_decay.ndim == 4
    numbers = (6 if by_channel else 5) * feature_map.features + v.shape[3]  # an estimate, for each token of a head
    tokens = span_tokens(v, policy, numbers * dtype.itemsize)
    keys, values = k.split(tokens, dim=2), v.split(tokens, dim=2)
    starts = repeat(None) if document_starts is None else document_starts.bool().split(tokens, dim=1)
    decays = repeat(None) if log_decay is None else log_decay.split(tokens, dim=2)
    spans = [
        recomputed(_of_span, feature_map, *span, dtype) for span in zip(keys, values, starts, decays, strict=False)
    ]
    return reduce(LinearEffect.then, spans)


def _of_span(
    feature_map: FeatureMap,
    k: Tensor,
    v: Tensor,
    starts: Tensor | None,
    log_decay: Tensor | None,
    dtype: torch.dtype,
) -> LinearEffect:
    with without_autocast(k):
        fk = feature_map.key(k)
        weights, transition = None, k.new_ones(*k.shape[:2], 1, dtype=dtype)
        if log_decay is not None:
            log_decay = (log_decay[..., None] if log_decay.ndim == 3 else log_decay).to(dtype)
            later = pad(log_decay[:, :, 1:], (0, 0, 0, 1)).flip(2).cumsum(2).flip(2)  # a difference would cancel
            weights, transition = later.exp(), log_decay.sum(2).exp()
        if starts is not None:
            document = starts.cumsum(1)
            current = (document == document[:, -1:])[:, None, :, None]
            weights = current.to(dtype) if weights is None else weights.masked_fill(~current, 0)
            transition = transition.masked_fill(starts.any(1)[:, None, None], 0)
        if weights is not None:
            fk = fk * weights.to(fk.dtype)
        keys, values = to_chunks(fk), to_chunks(v.to(fk.dtype))
        # the sums of chunks are added in `dtype`: one product over all tokens would round more in bfloat16
        of_values = (keys.mT @ values).sum(0, dtype=dtype)
        return LinearEffect(transition, torch.cat([of_values, fk.sum(2, dtype=dtype)[..., None]], dim=-1))
