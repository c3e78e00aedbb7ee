"""Linformer's projections of keys and values from T tokens to k slots: a matrix, pooling or a convolution.

B batch, H heads, T time, n longest input, k slots, R = n / k tokens of a slot.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad


class Projected(NamedTuple):
    x: Tensor  # (B, H, k, D)
    filled: Tensor | None  # (B, k) bool, true for slots that hold a token; None: all do


class Projection(nn.Module, ABC):
    """(B, H, T, D) -> (B, H, k, D), over the tokens where `mask` (B, T) is true; None: over all."""

    @abstractmethod
    def forward(self, x: Tensor, mask: Tensor | None) -> Projected:
        """Return the slots, and which of them hold a token."""

    @abstractmethod
    def definition(self, x: Tensor) -> Tensor:
        """Return the slots (k, width) of one head of one row (T, width), by the formula."""


class Matrix(Projection):
    """E x, with a column of E for each position and a row for each slot; shorter inputs use the first columns."""

    def __init__(self, slots: int, longest: int):
        super().__init__()
        # slots are then about as large as their tokens, for an input of the full length
        self.matrix = nn.Parameter(torch.randn(slots, longest) * longest**-0.5)

    def forward(self, x: Tensor, mask: Tensor | None) -> Projected:
        return Projected(self.matrix[:, : x.shape[2]] @ _blank(x, mask), None)

    def definition(self, x: Tensor) -> Tensor:
        return self.matrix[:, : len(x)] @ x


class Mean(Projection):
    """The mean of the tokens of each slot."""

    def __init__(self, tokens: int):
        super().__init__()
        self.tokens = tokens

    def forward(self, x: Tensor, mask: Tensor | None) -> Projected:
        total = _in_slots(_blank(x, mask), 2, self.tokens).sum(3)
        there = x.new_ones(1, x.shape[2], dtype=torch.bool) if mask is None else mask
        count = _in_slots(there, 1, self.tokens).sum(2)
        return Projected(total / count.clamp(min=1)[:, None, :, None], _filled(mask, self.tokens))

    def definition(self, x: Tensor) -> Tensor:
        return torch.stack([part.mean(0) for part in x.split(self.tokens)])


class Max(Projection):
    """The largest of the tokens of each slot, in each feature."""

    def __init__(self, tokens: int):
        super().__init__()
        self.tokens = tokens

    def forward(self, x: Tensor, mask: Tensor | None) -> Projected:
        lowest = torch.finfo(x.dtype).min
        largest = _in_slots(_blank(x, mask, lowest), 2, self.tokens, lowest).amax(3)
        filled = _filled(mask, self.tokens)
        return Projected(_blank(largest, filled), filled)

    def definition(self, x: Tensor) -> Tensor:
        return torch.stack([part.amax(0) for part in x.split(self.tokens)])


class Convolution(Projection):
    """A convolution over time and features, as wide as its stride: each slot sums W_r x_r over its tokens."""

    def __init__(self, tokens: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(tokens, width, width) * (tokens * width) ** -0.5)

    def forward(self, x: Tensor, mask: Tensor | None) -> Projected:
        parts = _in_slots(_blank(x, mask), 2, len(self.weight))
        slots = torch.einsum("bhkrd,rde->bhke", parts, self.weight)
        return Projected(slots, _filled(mask, len(self.weight)))

    def definition(self, x: Tensor) -> Tensor:
        parts = x.split(len(self.weight))
        return torch.stack([sum(token @ w for token, w in zip(part, self.weight, strict=False)) for part in parts])


PROJECTIONS: dict[str, Callable[[int, int, int], Projection]] = {
    "linear": lambda slots, longest, width: Matrix(slots, longest),
    "mean": lambda slots, longest, width: Mean(longest // slots),
    "max": lambda slots, longest, width: Max(longest // slots),
    "conv": lambda slots, longest, width: Convolution(longest // slots, width),
}


def _blank(x: Tensor, mask: Tensor | None, value: float = 0) -> Tensor:
    """Return x (B, H, T, D) with `value` where `mask` (B, T) is false."""
    return x if mask is None else x.masked_fill(~mask[:, None, :, None], value)


def _filled(mask: Tensor | None, tokens: int) -> Tensor | None:
    """Return (B, k), true for slots of `tokens` tokens of which `mask` shows one; None where it is None."""
    return None if mask is None else _in_slots(mask, 1, tokens).any(2)


def _in_slots(x: Tensor, axis: int, tokens: int, fill: float = 0) -> Tensor:
    """Split an axis of time into slots of `tokens` tokens, the last one padded."""
    missing = -x.shape[axis] % tokens
    after = [0, 0] * (x.ndim - 1 - axis) + [0, missing]
    return pad(x, after, value=fill).unflatten(axis, (-1, tokens))
