"""Counts of what is allocated, to find what grows with the number of calls."""

import ctypes
import gc
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import pytest

ROUND, ROUNDS = 8, 8

has_mallinfo = sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallinfo2")
with_mallinfo = pytest.mark.skipif(not has_mallinfo, reason="mallinfo2 is a function of the GNU C library")


class MallInfo(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
    ))  # fmt: skip


class InUse(NamedTuple):
    allocated: int  # bytes, by malloc
    objects: int  # that Python's garbage collector knows


def in_use() -> InUse:
    gc.collect()
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = MallInfo
    info = mallinfo2()
    return InUse(info.uordblks + info.hblkhd, len(gc.get_objects()))


def is_flat(used: list[InUse]) -> bool:
    """Whether one of the rounds between these has kept less than a small tensor for each call, and one less than an
    object. Lists of free blocks, which malloc counts too, fill up in the others."""
    rounds = list(pairwise(used))
    return any(after.allocated - before.allocated < 2048 * ROUND for before, after in rounds) and any(
        after.objects - before.objects < ROUND for before, after in rounds
    )


def assert_leaves_nothing(call: Callable[[int], object]) -> None:
    used = [in_use()]
    while not is_flat(used):
        assert len(used) <= ROUNDS, used
        for number in range(ROUND):
            call(number)
        used.append(in_use())
