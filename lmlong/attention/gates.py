"""Forget gates: the share of its state that a head, or each feature of it, keeps at each token, as a logarithm.

H heads, F features.
"""

import math

import torch
from torch import Tensor

from lmlong.attention.inputs import Gate

LONGEST_MEMORY = 8192


def forget_gate(heads: int, longest: int = LONGEST_MEMORY) -> Gate:
    """Return a gate learned for each head, which starts with a long memory."""
    return Gate("forget_gate", "log_sigmoid", (memory_lengths(heads, longest) - 1).log())


RANK = 16
"""That of the projection of a gate for each feature: a whole matrix would be as large as those of queries and keys."""


def channel_forget_gate(heads: int, features: int, longest: int = LONGEST_MEMORY) -> Gate:
    """Return a gate learned for each feature (H, F); the features of a head start with one memory."""
    start = forget_gate(heads, longest).start
    return Gate("forget_gate", "log_sigmoid", start[:, None].expand(-1, features), RANK)


def fixed_log_decay(heads: int, longest: int = LONGEST_MEMORY) -> Tensor:
    """Return the log decay (H,) of heads that forget at a constant rate."""
    return torch.log1p(-1 / memory_lengths(heads, longest)).to(torch.get_default_device())


def memory_lengths(heads: int, longest: int = LONGEST_MEMORY) -> Tensor:
    """Return the tokens after which 1/e of a head's state is left: from 2 to `longest`, evenly on a log scale.

    On a CPU, whatever the default device is: on the meta device torch loads its compiler for `logspace`, which takes a
    second."""
    if heads == 1:
        return torch.tensor([1024.0], device="cpu")
    return torch.logspace(1, math.log2(longest), heads, base=2.0, device="cpu")
