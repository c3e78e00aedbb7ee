"""Feature maps, which replace softmax's exponential: sim(q, k) = phi(q) . phi(k) is never negative.

A map treats each token by itself: scaling a key by other keys would let the future change the past. Queries and keys
have the same number of features.

B batch, H heads, T time, D head dim, F features.
"""

import math
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import rms_norm

from lmlong.recipe.kinds import FEATURE_MAP_KINDS

RMS_EPS = 1e-6
"""Added to mean squares, so that a zero vector is not divided by 0."""


class FeatureMap(nn.Module, ABC):
    """(B, H, T, D) -> (B, H, T, F), each token by itself."""

    largest_scale = 1e4
    """Largest standard deviation of q and k for which outputs and gradients are as exact as the number format."""

    uses_rope = False
    """Whether RoPE is applied to queries and keys unless the recipe sets it. Recipes ask the class of a plug-in."""

    signed = False
    """Whether features may be negative. Only the sum over all features is then known to be positive, so a head must
    decay all features at the same rate."""

    def __init__(self, features: int):
        super().__init__()
        self.features = features

    @abstractmethod
    def query(self, q: Tensor) -> Tensor:
        """Return phi(q)."""

    def key(self, k: Tensor) -> Tensor:
        """Return phi(k), by default the same map as for queries."""
        return self.query(k)


ELU_FLOOR = 1e-4


class Elu(FeatureMap):
    """elu(x) + 1 (Katharopoulos et al. 2020), plus a small floor that keeps the denominator above 0."""

    def query(self, q: Tensor) -> Tensor:
        return _EluPlusOne.apply(q)


class _EluPlusOne(torch.autograd.Function):
    """exp of the negative part, which is its own gradient, plus the positive part and the floor.

    Adding 1 to torch's elu would round small features to 0 in bfloat16. exp2 takes a third of the time of exp.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x32 = x.to(torch.promote_types(x.dtype, torch.float32))
        derivative = x32.clamp(max=0).mul_(1 / math.log(2)).exp2_()
        ctx.save_for_backward(derivative.to(x.dtype))
        return x32.clamp(min=0).add_(derivative).add_(ELU_FLOOR).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (derivative,) = ctx.saved_tensors
        return derivative * grads[0]


class Relu(FeatureMap):
    """relu(x) plus a floor that keeps the denominator above 0 when all features are off."""

    FLOOR = 1e-2

    def query(self, q: Tensor) -> Tensor:
        return torch.relu(q) + self.FLOOR


class Cosine(FeatureMap):
    """[1, c x / |x|]: sim is 1 + c^2 cos(q, k), softmax to first order, kept positive by unit norms (Su 2020)."""

    uses_rope = FEATURE_MAP_KINDS["cosine"].uses_rope
    signed = FEATURE_MAP_KINDS["cosine"].signed

    SHRINK = 0.99
    """c: below 1 by more than bfloat16's rounding, otherwise opposite vectors give a denominator of 0 or less."""

    TINY = 1e-6

    def __init__(self, head_dim: int):
        super().__init__(1 + head_dim)

    def query(self, q: Tensor) -> Tensor:
        x32 = q.to(torch.promote_types(q.dtype, torch.float32))
        length = (x32.square().sum(-1, keepdim=True) + self.TINY).sqrt()
        direction = (self.SHRINK * x32 / length).to(q.dtype)
        return torch.cat([torch.ones_like(direction[..., :1]), direction], dim=-1)


class Softmax(FeatureMap):
    """Softmax over the features of each token, for queries and keys, the causal form of Shen et al. 2018. A floor is
    added because the product of two different one-hot vectors is 0."""

    FLOOR = 1e-4

    def query(self, q: Tensor) -> Tensor:
        return q.softmax(-1).to(q.dtype) + self.FLOOR


class Hedgehog(FeatureMap):
    """Softmax over [x, -x] of a learned projection x of the head, initialized as the identity (after Zhang et al.
    2024), plus the floor of `Softmax`. Designed to learn softmax attention from a teacher.

    It is the exponential of both signs, normalized for each token. Normalizing queries changes no output, and
    normalizing keys bounds them.
    """

    FLOOR = Softmax.FLOOR

    def __init__(self, heads: int, head_dim: int):
        super().__init__(2 * head_dim)
        self.query_projection = nn.Parameter(torch.eye(head_dim).repeat(heads, 1, 1))
        self.key_projection = nn.Parameter(torch.eye(head_dim).repeat(heads, 1, 1))

    def query(self, q: Tensor) -> Tensor:
        return self._expand(q, self.query_projection)

    def key(self, k: Tensor) -> Tensor:
        return self._expand(k, self.key_projection)

    def _expand(self, x: Tensor, weight: Tensor) -> Tensor:
        x = x @ weight.to(x.dtype)
        return torch.cat([x, -x], dim=-1).softmax(-1).to(x.dtype) + self.FLOOR


class Taylor(FeatureMap):
    """[1, x, x (x) x / sqrt 2] of a small learned projection or of the whole head: sim is 1 + s + s^2 / 2, exp(s) to
    second order.

    x is normalized, so that |s| is at most sqrt(inner). For large s the sum of squares and mixed terms, positive in
    exact arithmetic, can round below 0.
    """

    signed = FEATURE_MAP_KINDS["taylor"].signed

    query_projection: nn.Parameter | None
    key_projection: nn.Parameter | None

    def __init__(self, heads: int, head_dim: int, projected: int | None):
        inner = projected or head_dim
        # each pair of x (x) x is kept once, with weight sqrt 2, which leaves all products unchanged
        super().__init__(1 + inner + inner * (inner + 1) // 2)
        for name in ("query_projection", "key_projection"):
            weight = nn.Parameter(torch.randn(heads, head_dim, inner) * head_dim**-0.5) if projected else None
            self.register_parameter(name, weight)
        self.inner = inner

    def query(self, q: Tensor) -> Tensor:
        return self._expand(q, self.query_projection)

    def key(self, k: Tensor) -> Tensor:
        return self._expand(k, self.key_projection)

    def _expand(self, x: Tensor, weight: Tensor | None) -> Tensor:
        x = x if weight is None else x @ weight.to(x.dtype)
        x = rms_norm(x, (self.inner,), eps=RMS_EPS) * self.inner**-0.25
        left, right = torch.triu_indices(self.inner, self.inner, offset=1, device=x.device)
        return torch.cat([torch.ones_like(x[..., :1]), x, x[..., left] * x[..., right], x * x * 0.5**0.5], dim=-1)
