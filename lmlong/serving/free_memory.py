"""Memory that is free in this process, given back to the system, where the C library can do that, as on Linux.

malloc would keep gigabytes of it for later: what has ended leaves holes between what goes on, into which new blocks of
the same size do not always fit.
"""

import ctypes
import mmap
import time
from contextlib import suppress
from pathlib import Path

STATM = Path("/proc/self/statm")
PAGE = mmap.PAGESIZE

SLACK = 128 << 20
"""Bytes that a process may grow by until it is seen whether they are free."""

EVERY, AT_LATEST = 0.25, 30.0
"""Seconds between two looks at how large it is, and after which free memory is given back though it has not grown."""


class FreeMemory:
    """Gives free memory back before there is too much of it."""

    def __init__(self) -> None:
        self._looked = self._given = time.monotonic()
        self._level = resident()

    def tidy(self) -> None:
        """Give it back if it is time to; called as often as one likes."""
        moment = time.monotonic()
        if moment < self._looked + EVERY:
            return
        self._looked, now = moment, resident()
        self._level = min(self._level, now)
        if now > self._level + SLACK or moment > self._given + AT_LATEST:
            self.give_back()

    def give_back(self) -> None:
        """Give it back now, which takes up to a tenth of a second."""
        with suppress(AttributeError, OSError, TypeError):  # where there is no such function
            ctypes.CDLL(None).malloc_trim(0)
        self._given, self._level = time.monotonic(), resident()


def resident() -> int:
    """Return the bytes of this process that are in memory; 0 where the system does not tell."""
    try:
        return PAGE * int(STATM.read_text().split()[1])
    except OSError:
        return 0
