"""Feature maps: what stands in for softmax's exponential, so that sim(q, k) = phi(q) . phi(k) is never negative.

Each is a small class with a face for queries, one for keys, and the number of features it makes.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn


class FeatureMap(nn.Module, ABC):
    """(..., width) -> (..., features), by each token alone."""

    largest_scale = 1e4
    """Largest deviation of q and k up to which outputs and gradients stay as exact as the number format allows."""

    def __init__(self, width: int):
        super().__init__()
        self.features = width

    @abstractmethod
    def query(self, q: Tensor) -> Tensor:
        """phi of queries."""

    def key(self, k: Tensor) -> Tensor:
        """phi of keys; the same as for queries unless a map says otherwise."""
        return self.query(k)


class Elu(FeatureMap):
    """elu(x) + 1 (Katharopoulos et al. 2020), plus a floor far below it, which keeps the denominator from 0."""

    def query(self, q: Tensor) -> Tensor:
        return _EluPlusOne.apply(q)


class _EluPlusOne(torch.autograd.Function):
    """The exponential of the negative part plus the positive part, and a slope that can be read off the value.

    Adding 1 to torch's elu would round small features away in bfloat16, and its backward pass reads more memory.
    """

    FLOOR = 1e-4

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.clamp(max=0).exp_().add_(x.clamp(min=0)).add_(_EluPlusOne.FLOOR)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return (y - _EluPlusOne.FLOOR).clamp_(0, 1).mul_(gradients[0])


class Relu(FeatureMap):
    """relu(x) plus a floor, which keeps the denominator from 0 where all features are off."""

    floor = 1e-2

    def query(self, q: Tensor) -> Tensor:
        return torch.relu(q) + self.floor
