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
    used: Tensor  # () the number of tokens


def tail_of(x: Tensor, length: int) -> Tail:
    """Return the last `length` of the tokens x (B, T, ...), or all if they are fewer."""
    count = min(x.shape[1], length)
    tokens = pad(x[:, x.shape[1] - count :], (*(0, 0) * (x.ndim - 2), 0, length - count))
    return Tail(tokens, torch.tensor(count, device=x.device))


def after_tail(past: Tensor, tail: Tail) -> Tensor:
    """Return the last L tokens (B, L, ...), given the last L before a part, and the tail of the part."""
    index = torch.arange(past.shape[1], device=past.device) + tail.used
    return torch.cat([past, tail.tokens.to(past.dtype)], dim=1).index_select(1, index)
