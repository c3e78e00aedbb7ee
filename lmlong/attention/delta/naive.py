"""The delta rule by definition: queries and keys of length one, and the state token by token.

    S_t = a_t (I - b_t fk_t fk_t^T) S_(t-1) + b_t fk_t v_t^T      y_t = S_t^T fq_t

B batch, H heads, T time, D head dim, F features, V value dim. `fq` and `fk` are features of queries and keys.
a_t = exp(log_decay_t), and 0 at a document start; b_t = beta_t. Only for a unit key is S^T fk the value stored under
it: a fraction b of it is removed, and the same fraction of the new value is added.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu

from lmlong.attention.feature_maps import Elu, FeatureMap, Relu

TINY = 1e-6
"""Added to squared lengths, so that a vector much shorter than its square root stays short, and a zero key changes
nothing."""


class Silu(FeatureMap):
    """silu(x) = x sigmoid(x). It may be negative, so only the delta rule, which has no denominator, can use it."""

    def query(self, q: Tensor) -> Tensor:
        return silu(q)


class Identity(FeatureMap):
    """x itself, for the delta rule alone, as `Silu`."""

    def query(self, q: Tensor) -> Tensor:
        return q


class UnitFeatures(FeatureMap):
    """The features of another map, scaled to length one."""

    def __init__(self, inner: FeatureMap):
        super().__init__(inner.features)
        self.inner = inner

    def query(self, q: Tensor) -> Tensor:
        return _unit(self.inner.query(q.to(torch.promote_types(q.dtype, torch.float32))))


def _unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + TINY).rsqrt()


INNER: dict[str, Callable[[int], FeatureMap]] = {"silu": Silu, "elu": Elu, "relu": Relu, "identity": Identity}
"""The maps before the scaling, by their names in recipes."""


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
