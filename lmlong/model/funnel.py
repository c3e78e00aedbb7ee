"""Downsampling in an encoder (funnel): blocks of tokens, each pooled into one vector, for the layers in the middle.

An encoder sees both sides, so a token is given what the inner layers make of its own block: nothing need be shifted.

B batch, T time, F factor, N blocks.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from lmlong.model.downsample import Shortening

Inner = Callable[[Tensor, Tensor | None], Tensor]
"""The inner layers: vectors (B, N, width) and where a row has none (B, N), to as many vectors."""


class Funnel(Shortening):
    """Shortens a sequence for the inner layers, lengthens what they make of it, and adds it."""

    def forward(self, x: Tensor, padding: Tensor | None, inner: Inner) -> Tensor:
        """x (B, T, width) of tokens, but where (B, T) is `padding`: the vectors after."""
        missing = -x.shape[1] % self.factor
        blocks = pad(x, (0, 0, 0, missing)).unflatten(1, (-1, self.factor))
        if padding is None and not missing:
            made = inner(self.pool(blocks), None)
        else:
            there = x.new_ones(1, x.shape[1], dtype=torch.bool) if padding is None else ~padding
            real = pad(there, (0, missing)).unflatten(1, (-1, self.factor))  # (B or 1, N, F)
            made = inner(self.pool(blocks, real), None if padding is None else ~real.any(2))
        return x + self.give(made).to(x.dtype).repeat_interleave(self.factor, 1)[:, : x.shape[1]]


def funnel_of_one(
    x: Tensor, factor: int, pool: Callable[[Tensor], Tensor], inner: Callable[[Tensor], Tensor]
) -> Tensor:
    """The definition, for one row x (T, width): `pool` makes a vector of a block, which at the end may have fewer
    tokens, `inner` of all vectors what is given to the tokens of each. Slow; the oracle of the tests."""
    given = inner(torch.stack([pool(block) for block in x.split(factor)]))
    return torch.stack([token + given[place // factor] for place, token in enumerate(x)])
