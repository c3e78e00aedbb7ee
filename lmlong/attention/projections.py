"""How Linformer shortens keys and values, from T tokens to k slots: by a matrix, by pooling or by a convolution.

B batch, H heads, T time, n longest input, k slots, R = n / k tokens of a slot.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad


class Projected(NamedTuple):
    x: Tensor  # (B, H, k, width)
    filled: Tensor  # (B, k) bool: slots that hold a token


class Projection(nn.Module, ABC):
    """(B, H, T, width) -> (B, H, k, width), over time only as far as `seen` (B, T) is true."""

    @abstractmethod
    def forward(self, x: Tensor, seen: Tensor) -> Projected:
        """The slots, and which of them hold a token."""

    @abstractmethod
    def definition(self, x: Tensor) -> Tensor:
        """The slots (k, width) of one head of one row (T, width), written from the formula."""


class Matrix(Projection):
    """E x, with a column of E for each place and a row for each slot; shorter inputs meet the first columns."""

    def __init__(self, slots: int, longest: int):
        super().__init__()
        # slots are then about as large as what they are made of, when the input is as long as it may be
        self.matrix = nn.Parameter(torch.randn(slots, longest) * longest**-0.5)

    def forward(self, x: Tensor, seen: Tensor) -> Projected:
        x = x.masked_fill(~seen[:, None, :, None], 0)
        return Projected(self.matrix[:, : x.shape[2]] @ x, seen.new_ones(len(x), len(self.matrix)))

    def definition(self, x: Tensor) -> Tensor:
        return self.matrix[:, : len(x)] @ x


class Mean(Projection):
    """The mean of the tokens of each slot."""

    def __init__(self, tokens: int):
        super().__init__()
        self.tokens = tokens

    def forward(self, x: Tensor, seen: Tensor) -> Projected:
        total = _in_slots(x.masked_fill(~seen[:, None, :, None], 0), 2, self.tokens).sum(3)
        count = _in_slots(seen, 1, self.tokens).sum(2)
        return Projected(total / count.clamp(min=1)[:, None, :, None], count > 0)

    def definition(self, x: Tensor) -> Tensor:
        return torch.stack([part.mean(0) for part in x.split(self.tokens)])


class Max(Projection):
    """The largest of the tokens of each slot, in each feature."""

    def __init__(self, tokens: int):
        super().__init__()
        self.tokens = tokens

    def forward(self, x: Tensor, seen: Tensor) -> Projected:
        lowest = torch.finfo(x.dtype).min
        largest = _in_slots(x.masked_fill(~seen[:, None, :, None], lowest), 2, self.tokens, lowest).amax(3)
        filled = _in_slots(seen, 1, self.tokens).any(2)
        return Projected(largest.masked_fill(~filled[:, None, :, None], 0), filled)

    def definition(self, x: Tensor) -> Tensor:
        return torch.stack([part.amax(0) for part in x.split(self.tokens)])


class Convolution(Projection):
    """A convolution over time and features, as wide as its stride: each slot sums W_r x_r over its tokens."""

    def __init__(self, tokens: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(tokens, width, width) * (tokens * width) ** -0.5)

    def forward(self, x: Tensor, seen: Tensor) -> Projected:
        tokens = len(self.weight)
        parts = _in_slots(x.masked_fill(~seen[:, None, :, None], 0), 2, tokens)
        slots = torch.einsum("bhkrd,rde->bhke", parts, self.weight)
        return Projected(slots, _in_slots(seen, 1, tokens).any(2))

    def definition(self, x: Tensor) -> Tensor:
        parts = x.split(len(self.weight))
        return torch.stack([sum(token @ w for token, w in zip(part, self.weight, strict=False)) for part in parts])


PROJECTIONS: dict[str, Callable[[int, int, int], Projection]] = {
    "linear": lambda slots, longest, width: Matrix(slots, longest),
    "mean": lambda slots, longest, width: Mean(longest // slots),
    "max": lambda slots, longest, width: Max(longest // slots),
    "conv": lambda slots, longest, width: Convolution(longest // slots, width),
}


def _in_slots(x: Tensor, axis: int, tokens: int, fill: float = 0) -> Tensor:
    """Split an axis of time into slots of so many tokens, the last one filled up."""
    missing = -x.shape[axis] % tokens
    after = [0, 0] * (x.ndim - 1 - axis) + [0, missing]
    return pad(x, after, value=fill).unflatten(axis, (-1, tokens))
