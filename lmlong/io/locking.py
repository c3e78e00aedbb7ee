"""The operating system's lock on an open file, released when its process ends: flock, or on Windows a locked byte."""

import os
from typing import Any

fcntl: Any = None
msvcrt: Any = None
try:
    import fcntl
except ImportError:
    import msvcrt

FAR = 1 << 30
"""Place of the byte that Windows locks: nobody may read it, and everybody may read who holds the lock."""


def lock(descriptor: int, wait: bool) -> bool:
    """Lock an open file; False where another process holds it and this one does not wait."""
    if fcntl is None:
        return _lock_byte(descriptor, wait)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        return True
    except BlockingIOError:
        return False


def _lock_byte(descriptor: int, wait: bool) -> bool:
    while True:
        os.lseek(descriptor, FAR, os.SEEK_SET)
        try:
            msvcrt.locking(descriptor, msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)  # LK_LOCK gives up after 10 s
            return True
        except OSError:
            if not wait:
                return False
