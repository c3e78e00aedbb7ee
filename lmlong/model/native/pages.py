"""Weights side by side, in the order in which they are fetched for each token."""

import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

LINE = 64
LARGE = 1 << 21
"""Bytes of a line of the processor's cache, and of a large page."""


def line_up(weights: Sequence[Tensor]) -> None:
    """Move weights to one stretch of memory, in large pages where the system has them: there are more small ones than a
    processor remembers the places of, so each would be looked up for each token."""
    sizes = [-(-weight.nbytes // LINE) * LINE for weight in weights]
    memory = mmap.mmap(-1, sum(sizes) + LARGE)
    with suppress(AttributeError, OSError):  # not every system has large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    room = torch.frombuffer(memory, dtype=torch.uint8)
    begin = -room.data_ptr() % LARGE
    for weight, size in zip(weights, sizes, strict=True):
        place = room[begin : begin + weight.nbytes].view(weight.dtype).view(weight.shape)
        weight.data = place.copy_(weight.detach())
        begin += size
