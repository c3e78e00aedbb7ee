"""Free memory of this process, returned to the system where the C library supports that, as on Linux.

malloc may keep gigabytes of it: finished requests leave holes between running ones, into which new blocks of the same
size do not always fit.
"""

import ctypes
import mmap
import time
from contextlib import suppress
from pathlib import Path

STATM = Path("/proc/self/statm")
PAGE = mmap.PAGESIZE

SLACK = 128 << 20
"""Bytes by which the process may grow before free memory is returned."""

EVERY, AT_LATEST = 0.25, 30.0
"""Seconds between two checks of the size, and after which free memory is returned even if the process did not grow."""


class FreeMemory:
    """Returns free memory to the system before there is too much of it."""

    def __init__(self) -> None:
        self._looked = self._given = time.monotonic()
        self._level = resident()

    def tidy(self) -> None:
        """Return free memory if it is due; cheap, so it may be called at every step."""
        moment = time.monotonic()
        if moment < self._looked + EVERY:
            return
        self._looked, now = moment, resident()
        self._level = min(self._level, now)
        if now > self._level + SLACK or moment > self._given + AT_LATEST:
            self.give_back()

    def give_back(self) -> None:
        """Return free memory now, which takes up to a tenth of a second."""
        with suppress(AttributeError, OSError, TypeError):  # where there is no such function
            ctypes.CDLL(None).malloc_trim(0)
        self._given, self._level = time.monotonic(), resident()


def resident() -> int:
    """Return the resident bytes of this process; 0 where the system does not report them."""
    try:
        return PAGE * int(STATM.read_text().split()[1])
    except OSError:
        return 0
