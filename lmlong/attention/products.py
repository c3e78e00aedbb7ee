"""Matrix products of vectors, in the dtype and in the shapes that suit the device.

K inputs, N outputs.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

ROWS = 128
"""Above this, the number of rows of a padded product is a multiple of it; below, a power of two."""


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return the products (..., N) of vectors (..., K) with a matrix (N, K), in few shapes where the CPU keeps compiled
    code for each.

    In half precision, torch computes them by oneDNN, which compiles code for each shape and keeps it: half a megabyte
    for each number of rows and each weight, up to gigabytes for texts of all lengths. So without gradients, the rows
    are padded to one of few numbers. Training reads batches of one shape, and computes them as they are.
    """
    if x.device.type != "cpu" or torch.is_grad_enabled() or (dtype := dtype_of_product(x)).itemsize > 2:
        return functional.linear(x, weight)
    vectors = x.reshape(-1, x.shape[-1])
    rows = len(vectors)
    if rows == (padded_rows := _padded(rows)):
        return functional.linear(x, weight)
    padded = x.new_zeros(padded_rows, x.shape[-1], dtype=dtype)
    padded[:rows] = vectors
    return functional.linear(padded, weight)[:rows].view(*x.shape[:-1], -1)


def dtype_of_product(x: Tensor) -> torch.dtype:
    """Return the dtype in which a product of x is computed: that of x, or what autocast rounds it to."""
    device = x.device.type
    rounds = x.dtype != torch.float64 and torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if rounds else x.dtype


def _padded(rows: int) -> int:
    if rows > ROWS:
        return math.ceil(rows / ROWS) * ROWS
    return 1 << (rows - 1).bit_length() if rows else 0
