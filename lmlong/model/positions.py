"""Rotary positions (Su et al. 2021): queries and keys are turned by angles that grow with their place in a document."""

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


def places(starts: Tensor | None, position: Tensor, time: int) -> Tensor:
    """How many tokens of its document come before each token: (batch, time), from `position` (batch,) of the first."""
    index = torch.arange(time, device=position.device)
    since_first = position[:, None] + index
    if starts is None:
        return since_first
    last_start = torch.where(starts, index, -1).cummax(dim=1).values
    return torch.where(last_start >= 0, index - last_start, since_first)
