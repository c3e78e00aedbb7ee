"""Positions: rotary (Su et al. 2021), applied to queries and keys, and sinusoidal (Vaswani et al. 2017), added to x.

B batch, H heads, T time, D head dim.
"""

import math

import torch
from torch import Tensor

from lmlong import recipe
from lmlong.model.device import float64_device

CPU = torch.device("cpu")
SINUSOIDAL_BASE = 10_000.0


def rope_frequencies(head_dim: int, options: recipe.Rope, device: torch.device = CPU) -> Tensor:
    """Return the angle by which each pair of a head's rotated numbers rotates per token, in float64."""
    half = options.rotated(head_dim) // 2
    frequencies = options.base ** (-torch.arange(half, device=device, dtype=torch.float64) / half)
    return frequencies if options.scaling is None else _scaled(frequencies, options.scaling)


def _scaled(frequencies: Tensor, scaling: recipe.RopeScaling) -> Tensor:
    """Return frequencies scaled as in Llama 3, by their number of turns within the original length."""
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    turns = scaling.original_length * frequencies / (2 * math.pi)
    unscaled = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (unscaled + (1 - unscaled) / scaling.factor)


def apply_rope(x: Tensor, positions: Tensor, options: recipe.Rope) -> Tensor:
    """Rotate x (B, H, T, D), or the share of D that rotates, by the angles of its positions (B, T). A pair is a number
    of each half."""
    # float64: at a million tokens float32 is off by a hundredth of a turn
    device = float64_device(positions.device)
    angles = positions[:, None, :, None].to(device) * rope_frequencies(x.shape[-1], options, device)
    cos, sin = (wave.to(x.dtype).to(x.device) for wave in (angles.cos(), angles.sin()))
    half = cos.shape[-1]
    left, right, fixed = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    rotated = [left * cos - right * sin, left * sin + right * cos]
    return torch.cat([*rotated, fixed] if fixed.shape[-1] else rotated, dim=-1)


def sinusoidal_positions(time: int, width: int, device: torch.device) -> Tensor:
    """Return sines and cosines of each position (T, width), from the fastest frequency to the slowest, in float64."""
    half, device = -(-width // 2), float64_device(device)
    frequencies = SINUSOIDAL_BASE ** (-torch.arange(half, device=device, dtype=torch.float64) / half)
    angles = torch.arange(time, device=device)[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=-1)[:, :width]


def document_positions(document_starts: Tensor | None, position: Tensor, time: int) -> Tensor:
    """Return the number of earlier tokens in its document for each token (B, T), given it for the first token (B,)."""
    index = torch.arange(time, device=position.device)
    since_first = position[:, None] + index
    if document_starts is None:
        return since_first
    last_start = torch.where(document_starts, index, -1).cummax(dim=1).values
    return torch.where(last_start >= 0, index - last_start, since_first)
