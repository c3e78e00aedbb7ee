"""Forget gates: the share of its state that a head keeps at each token, as a logarithm.

H heads.
"""

import torch
from torch import Tensor

from lmlong.attention.inputs import Gate


def forget_gate(heads: int) -> Gate:
    """Return a gate learned for each head, which starts with a long memory."""
    return Gate("forget_gate", "log_sigmoid", (memory_lengths(heads) - 1).log())


def fixed_log_decay(heads: int) -> Tensor:
    """Return the log decay (H,) of heads that forget at a constant rate."""
    return torch.log1p(-1 / memory_lengths(heads)).to(torch.get_default_device())


def memory_lengths(heads: int) -> Tensor:
    """Return the tokens after which 1/e of a head's state is left: from 2 to 8,192, evenly on a log scale.

    On a CPU, whatever the default device is: on the meta device torch loads its compiler for `logspace`, which takes a
    second."""
    return torch.logspace(1, 13, heads, base=2.0, device="cpu") if heads > 1 else torch.tensor([1024.0], device="cpu")
