"""Counts of what is allocated, to find what grows with the number of calls."""

import ctypes
import gc
import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest

ROUND, ROUNDS = 8, 8

with_mallinfo = pytest.mark.skipif(sys.platform != "linux", reason="mallinfo2 is a function of the GNU C library")


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


def is_flat(before: InUse, after: InUse) -> bool:
    """Whether a round of calls has kept less than a small tensor and an object for each call."""
    return after.allocated - before.allocated < 2048 * ROUND and after.objects - before.objects < ROUND


def assert_leaves_nothing(call: Callable[[int], object]) -> None:
    """Call until a round is flat: lists of free blocks, which malloc counts too, fill up in those before."""
    used = [in_use()]
    for _ in range(ROUNDS):
        for number in range(ROUND):
            call(number)
        used.append(in_use())
        if is_flat(*used[-2:]):
            return
    pytest.fail(f"each of {ROUNDS} rounds has kept memory: {used}")
