"""Forget gates: the log of the fraction of its state that a head, or a feature of a head, keeps at each token.

H heads, F features.
"""

import math

import torch
from torch import Tensor

from lmlong.attention.inputs import Gate

LONGEST_MEMORY = 8192


def forget_gate(heads: int, longest: int = LONGEST_MEMORY) -> Gate:
    """Return a learned gate for each head, with memories from short to `longest` tokens at the start."""
    return Gate("forget_gate", "log_sigmoid", (memory_lengths(heads, longest) - 1).log())


RANK = 16
"""Rank of the projection to a gate for each feature: a full matrix would be as large as the query projection."""


def channel_forget_gate(heads: int, features: int, longest: int = LONGEST_MEMORY) -> Gate:
    """Return a learned gate for each feature (H, F); all features of a head start with the same memory."""
    start = forget_gate(heads, longest).start
    return Gate("forget_gate", "log_sigmoid", start[:, None].expand(-1, features), RANK)


def fixed_log_decay(heads: int, longest: int = LONGEST_MEMORY) -> Tensor:
    """Return the log decay (H,) of heads that forget at a constant rate."""
    return torch.log1p(-1 / memory_lengths(heads, longest)).to(torch.get_default_device())


def memory_lengths(heads: int, longest: int = LONGEST_MEMORY) -> Tensor:
    """Return the number of tokens after which 1/e of a head's state is left: from 2 to `longest`, evenly on a log
    scale.

    Always on the CPU: on the meta device, `logspace` makes torch load its compiler, which takes a second."""
    if heads == 1:
        return torch.tensor([1024.0], device="cpu")
    return torch.logspace(1, math.log2(longest), heads, base=2.0, device="cpu")
