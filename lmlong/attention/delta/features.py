"""Queries and keys of length one, as the delta rule needs: only for a unit key k is S^T k the value stored under it.

B batch, H heads, T time, D head dim.
"""

from collections.abc import Callable

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


class UnitFeatures(FeatureMap):
    """The features of another map, scaled to length one."""

    def __init__(self, inner: FeatureMap):
        super().__init__(inner.features)
        self.inner = inner

    def query(self, q: Tensor) -> Tensor:
        return _unit(self.inner.query(q.to(torch.promote_types(q.dtype, torch.float32))))


def _unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + TINY).rsqrt()


INNER: dict[str, Callable[[int], FeatureMap]] = {"silu": Silu, "elu": Elu, "relu": Relu}
"""The maps before the scaling, by their names in recipes."""
