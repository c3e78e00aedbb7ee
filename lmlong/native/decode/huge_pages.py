"""Pack weights in memory in the order in which a token reads them."""

import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

CACHE_LINE = 64
HUGE_PAGE = 1 << 21
"""Bytes."""


def pack_in_huge_pages(weights: Sequence[Tensor]) -> None:
    """Move weights to one block of memory, in huge pages if the system has them. There are more small pages than TLB
    entries, so each token would look them all up."""
    sizes = [-(-weight.nbytes // CACHE_LINE) * CACHE_LINE for weight in weights]
    if hasattr(mmap, "MADV_HUGEPAGE"):  # file-backed or shared memory would have small pages
        memory = mmap.mmap(-1, sum(sizes) + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # not every system has them
            memory.madvise(mmap.MADV_HUGEPAGE)
    else:
        memory = mmap.mmap(-1, sum(sizes) + HUGE_PAGE)
    block = torch.frombuffer(memory, dtype=torch.uint8)
    begin = -block.data_ptr() % HUGE_PAGE
    for weight, size in zip(weights, sizes, strict=True):
        packed = block[begin : begin + weight.nbytes].view(weight.dtype).view(weight.shape)
        weight.data = packed.copy_(weight.detach())
        begin += size
