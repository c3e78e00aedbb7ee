"""Forget gates: the share of its state that a head keeps at each token, as a logarithm.

H heads.
"""

import math

import torch
from torch import Tensor

from lmlong.attention.inputs import Gate

LONGEST_MEMORY = 8192


def forget_gate(heads: int, longest: int = LONGEST_MEMORY) -> Gate:
    """Return a gate learned for each head, which starts with a long memory."""
    return Gate("forget_gate", "log_sigmoid", (memory_lengths(heads, longest) - 1).log())


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
