"""Counts of what is allocated, to find what grows with the number of calls."""

import ctypes
import gc
import sys
from collections.abc import Callable
from itertools import pairwise
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


def assert_flat(used: list[InUse]) -> None:
    """Assert that one of the rounds between these has kept less than a small tensor and an object for each call. Lists
    of free blocks, which malloc counts too, fill up in the others."""
    assert min(after.allocated - before.allocated for before, after in pairwise(used)) < 2048 * ROUND, used
    assert min(after.objects - before.objects for before, after in pairwise(used)) < ROUND, used


def assert_leaves_nothing(call: Callable[[int], object]) -> None:
    used = []
    for _ in range(ROUNDS):
        for number in range(ROUND):
            call(number)
        used.append(in_use())
    assert_flat(used)
