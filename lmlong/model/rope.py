"""Positions: rotary (Su et al. 2021), applied to queries and keys, and sinusoidal (Vaswani et al. 2017), added to x.

B batch, H heads, T time, D head dim.
"""

import torch
from torch import Tensor

from lmlong.model.device import float64_device

ROPE_BASE = 10_000.0


def apply_rope(x: Tensor, positions: Tensor) -> Tensor:
    """Rotate x (B, H, T, D), pairs of its first and second half, by the angles of its positions (B, T)."""
    half = x.shape[-1] // 2
    # float64: at a million tokens float32 is off by a hundredth of a turn
    where = float64_device(positions.device)
    frequencies = ROPE_BASE ** (-torch.arange(half, device=where, dtype=torch.float64) / half)
    angles = positions[:, None, :, None].to(where) * frequencies
    cos, sin = (wave.to(x.dtype).to(x.device) for wave in (angles.cos(), angles.sin()))
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, left * sin + right * cos], dim=-1)


def sinusoidal_positions(time: int, width: int, device: torch.device) -> Tensor:
    """Return sines and cosines of each position (T, width), from the fastest frequency to the slowest, in float64."""
    half, where = -(-width // 2), float64_device(device)
    frequencies = ROPE_BASE ** (-torch.arange(half, device=where, dtype=torch.float64) / half)
    angles = torch.arange(time, device=where)[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=-1)[:, :width]


def document_positions(document_starts: Tensor | None, position: Tensor, time: int) -> Tensor:
    """Return how many tokens of its document come before each token (B, T), given that of the first one (B,)."""
    index = torch.arange(time, device=position.device)
    since_first = position[:, None] + index
    if document_starts is None:
        return since_first
    last_start = torch.where(document_starts, index, -1).cummax(dim=1).values
    return torch.where(last_start >= 0, index - last_start, since_first)
