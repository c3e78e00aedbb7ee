"""Weights packed in memory, in the order in which they are fetched for each token."""

import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

LINE = 64
LARGE = 1 << 21
"""Bytes of a line of the processor's cache, and of a large page."""


def pack_in_huge_pages(weights: Sequence[Tensor]) -> None:
    """Move weights to one block of memory, in huge pages where the system has them: small pages are more than the TLB
    holds, so each would be looked up for each token."""
    sizes = [-(-weight.nbytes // LINE) * LINE for weight in weights]
    if hasattr(mmap, "MADV_HUGEPAGE"):  # file-backed or shared memory would have small pages
        memory = mmap.mmap(-1, sum(sizes) + LARGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # not every system has them
            memory.madvise(mmap.MADV_HUGEPAGE)
    else:
        memory = mmap.mmap(-1, sum(sizes) + LARGE)
    room = torch.frombuffer(memory, dtype=torch.uint8)
    begin = -room.data_ptr() % LARGE
    for weight, size in zip(weights, sizes, strict=True):
        place = room[begin : begin + weight.nbytes].view(weight.dtype).view(weight.shape)
        weight.data = place.copy_(weight.detach())
        begin += size
