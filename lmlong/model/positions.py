"""Where a token stands: turns of queries and keys that grow with their place in a document (rotary positions, Su et al.
2021), or waves of the place that are added to the token (Vaswani et al. 2017)."""

import torch
from torch import Tensor

BASE = 10_000.0


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """x (batch, heads, time, width) with each pair of its halves turned by the place `positions` (batch, time)."""
    half = x.shape[-1] // 2
    # float64: at a million tokens float32 is off by a hundredth of a turn
    frequencies = BASE ** (-torch.arange(half, device=positions.device, dtype=torch.float64) / half)
    angles = positions[:, None, :, None] * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, left * sin + right * cos], dim=-1)


def waves(time: int, width: int, device: torch.device) -> Tensor:
    """Sines and cosines of each place (time, width), from those that turn with every token to those that hardly do."""
    half = -(-width // 2)
    frequencies = BASE ** (-torch.arange(half, device=device, dtype=torch.float64) / half)
    angles = torch.arange(time, device=device)[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=-1)[:, :width]


def places(starts: Tensor | None, position: Tensor, time: int) -> Tensor:
    """How many tokens of its document come before each token: (batch, time), from `position` (batch,) of the first."""
    index = torch.arange(time, device=position.device)
    since_first = position[:, None] + index
    if starts is None:
        return since_first
    last_start = torch.where(starts, index, -1).cummax(dim=1).values
    return torch.where(last_start >= 0, index - last_start, since_first)
