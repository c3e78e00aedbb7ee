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
    filled: Tensor | None  # (B, k) bool: slots that hold a token; None: all do


class Projection(nn.Module, ABC):
    """(B, H, T, width) -> (B, H, k, width), over time only as far as `seen` (B, T) is true; None: everywhere."""

    @abstractmethod
    def forward(self, x: Tensor, seen: Tensor | None) -> Projected:
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

    def forward(self, x: Tensor, seen: Tensor | None) -> Projected:
        return Projected(self.matrix[:, : x.shape[2]] @ _blank(x, seen), None)

    def definition(self, x: Tensor) -> Tensor:
        return self.matrix[:, : len(x)] @ x


class Mean(Projection):
    """The mean of the tokens of each slot."""

    def __init__(self, tokens: int):
        super().__init__()
        self.tokens = tokens

    def forward(self, x: Tensor, seen: Tensor | None) -> Projected:
        total = _in_slots(_blank(x, seen), 2, self.tokens).sum(3)
        there = x.new_ones(1, x.shape[2], dtype=torch.bool) if seen is None else seen
        count = _in_slots(there, 1, self.tokens).sum(2)
        return Projected(total / count.clamp(min=1)[:, None, :, None], _filled(seen, self.tokens))

    def definition(self, x: Tensor) -> Tensor:
        return torch.stack([part.mean(0) for part in x.split(self.tokens)])


class Max(Projection):
    """The largest of the tokens of each slot, in each feature."""

    def __init__(self, tokens: int):
        super().__init__()
        self.tokens = tokens

    def forward(self, x: Tensor, seen: Tensor | None) -> Projected:
        lowest = torch.finfo(x.dtype).min
        largest = _in_slots(_blank(x, seen, lowest), 2, self.tokens, lowest).amax(3)
        filled = _filled(seen, self.tokens)
        return Projected(_blank(largest, filled), filled)

    def definition(self, x: Tensor) -> Tensor:
        return torch.stack([part.amax(0) for part in x.split(self.tokens)])


class Convolution(Projection):
    """A convolution over time and features, as wide as its stride: each slot sums W_r x_r over its tokens."""

    def __init__(self, tokens: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(tokens, width, width) * (tokens * width) ** -0.5)

    def forward(self, x: Tensor, seen: Tensor | None) -> Projected:
        parts = _in_slots(_blank(x, seen), 2, len(self.weight))
        slots = torch.einsum("bhkrd,rde->bhke", parts, self.weight)
        return Projected(slots, _filled(seen, len(self.weight)))

    def definition(self, x: Tensor) -> Tensor:
        parts = x.split(len(self.weight))
        return torch.stack([sum(token @ w for token, w in zip(part, self.weight, strict=False)) for part in parts])


PROJECTIONS: dict[str, Callable[[int, int, int], Projection]] = {
    "linear": lambda slots, longest, width: Matrix(slots, longest),
    "mean": lambda slots, longest, width: Mean(longest // slots),
    "max": lambda slots, longest, width: Max(longest // slots),
    "conv": lambda slots, longest, width: Convolution(longest // slots, width),
}


def _blank(x: Tensor, seen: Tensor | None, value: float = 0) -> Tensor:
    """(B, H, T, width) with this value wherever (B, T) says that nothing is seen."""
    return x if seen is None else x.masked_fill(~seen[:, None, :, None], value)


def _filled(seen: Tensor | None, tokens: int) -> Tensor | None:
    """(B, k), true for slots of so many tokens of which one is seen; None where all are."""
    return None if seen is None else _in_slots(seen, 1, tokens).any(2)


def _in_slots(x: Tensor, axis: int, tokens: int, fill: float = 0) -> Tensor:
    """Split an axis of time into slots of so many tokens, the last one filled up."""
    missing = -x.shape[axis] % tokens
    after = [0, 0] * (x.ndim - 1 - axis) + [0, missing]
    return pad(x, after, value=fill).unflatten(axis, (-1, tokens))
