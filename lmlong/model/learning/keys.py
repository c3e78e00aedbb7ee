"""The keys by which an output layer learns: the last hidden states, or fewer numbers if the vocabulary is large, so
that D takes at most 16 MiB.

A random projection keeps the products of hidden states nearly, and learning uses nothing else of them.
"""

from functools import cache

import numpy as np
import torch
from torch import Tensor

MOST_NUMBERS = 1 << 22
"""Maximum number of numbers in D."""


def rank(vocabulary: int, width: int) -> int:
    """Return the size of a key."""
    most = max(1, MOST_NUMBERS // vocabulary)
    return width if width <= most else 1 << (most.bit_length() - 1)


def keys_of(hidden: Tensor, D: Tensor) -> Tensor:
    """Return the keys (..., rank) of hidden states (..., width) for D (..., V, rank)."""
    width = hidden.shape[-1]
    if D.shape[-1] == width:
        return hidden
    with torch.autocast(hidden.device.type, enabled=False):
        return hidden @ _projection(width, D.shape[-1], hidden.device, hidden.dtype)


@cache
def _projection(width: int, rank: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return a random matrix (width, rank) with orthogonal columns that keeps the expected norm.

    It is the same on every machine, since saved states depend on it: numpy never changes the numbers of RandomState,
    and a QR decomposition is unique up to signs.
    """
    q, r = np.linalg.qr(np.random.RandomState(0).standard_normal((width, rank)))
    return torch.from_numpy(q * np.sign(np.diag(r)) * (width / rank) ** 0.5).to(device, dtype)
