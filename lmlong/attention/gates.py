"""Forget gates: the share of its state that a head keeps at each token.

B batch, T time, H heads.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

MIN_LOG_DECAY = -20.0
"""A gate keeps at least exp(-20) of the state at a token, so that sums of log decays stay exact."""


class ForgetGate(nn.Module):
    """A learned decay in (0, 1) for each token and head, as its logarithm; initialized to a long memory."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(heads, width))
        self.bias = nn.Parameter(on_default_device((memory_lengths(heads) - 1).log()))

    def forward(self, x: Tensor) -> Tensor:
        """Return log decays (B, H, T) of x (B, T, width), in float32 at least: bfloat16 cannot tell 0.999 from 1."""
        with torch.autocast(x.device.type, enabled=False):
            dtype = torch.promote_types(x.dtype, torch.float32)
            logit = x.to(dtype) @ self.weight.to(dtype).mT + self.bias.to(dtype)
            return logsigmoid(logit).clamp(min=MIN_LOG_DECAY).mT


def fixed_log_decay(heads: int) -> Tensor:
    """Return the log decay (H,) of heads that forget at a constant rate."""
    return on_default_device(torch.log1p(-1 / memory_lengths(heads)))


def memory_lengths(heads: int) -> Tensor:
    """Return the tokens after which 1/e of a head's state is left: from 2 to 8,192, evenly on a log scale; on a CPU."""
    return torch.logspace(1, 13, heads, base=2.0, device="cpu") if heads > 1 else torch.tensor([1024.0], device="cpu")


def on_default_device(x: Tensor) -> Tensor:
    """Move a CPU tensor to the default device. It is not computed there: on the meta device torch loads its compiler
    for `logspace`, which takes a second."""
    return x.to(torch.get_default_device())
