"""The last tokens of a text, in a state or in the effect of a part.

B batch, L length of the tail, T time.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad


class Tail(NamedTuple):
    """The last tokens of a part, up to L."""

    tokens: Tensor  # (B, L, ...), padded with zeros after the last
    number: Tensor  # () of these tokens


def tail_of(x: Tensor, length: int, dim: int = 1) -> Tail:
    """Return the last `length` of the tokens x (B, T, ...), or all if they are fewer. `dim` is the dimension of the
    tokens, here and in the tail."""
    number = min(x.shape[dim], length)
    last = x.narrow(dim, x.shape[dim] - number, number)
    tokens = pad(last, (*(0, 0) * (x.ndim - 1 - dim), 0, length - number))
    return Tail(tokens, torch.full((), number, device=x.device))


def after_tail(past: Tensor, tail: Tail, dim: int = 1) -> Tensor:
    """Return the last L tokens (B, L, ...), given the last L before a part, and the tail of the part, in its dtype."""
    index = torch.arange(past.shape[dim], device=past.device) + tail.number
    return torch.cat([past.to(tail.tokens.dtype), tail.tokens], dim=dim).index_select(dim, index)
