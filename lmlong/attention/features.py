"""Feature maps: what stands in for softmax's exponential, so that sim(q, k) = phi(q) . phi(k) is never negative.

Each is a small class with a face for queries, one for keys, and the number of features it makes.
"""

from abc import ABC, abstractmethod

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
    """elu(x) + 1 (Katharopoulos et al. 2020), level below -10, where exp would fall on towards a denominator of 0."""

    def query(self, q: Tensor) -> Tensor:
        # exp of the negative part plus the positive part: several times faster on a CPU than elu itself
        return q.clamp(-10, 0).exp() + q.clamp(min=0)


class Relu(FeatureMap):
    """relu(x) plus a floor, which keeps the denominator from 0 where all features are off."""

    floor = 1e-2

    def query(self, q: Tensor) -> Tensor:
        return torch.relu(q) + self.floor
