"""File locks that the system releases when the process that holds them ends, even after a crash."""

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

UNSUPPORTED = {errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK}
"""Errors of file systems without locks."""


class Held(Exception):
    """Another process holds the lock."""


@contextmanager
def lock(path: Path, waiting: str | None = None) -> Iterator[bool]:
    """Hold a lock on a file, which is removed at the end. Yield False if the file system has no locks: then no other
    process is kept out.

    If another process holds the lock, raise `Held`, or with `waiting` print that text and wait.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = FileLock(path, fallback_to_soft=False)
    try:
        file.acquire(blocking=False)
    except Timeout:
        if waiting is None:
            raise Held from None
        print(f"{waiting}: waiting for another process", file=sys.stderr, flush=True)
        file.acquire()
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
    try:
        yield file.is_locked
    finally:
        with suppress(OSError):  # Windows removes no open file
            if not path.stat().st_size:  # otherwise it belongs to somebody else
                path.unlink()
        file.release()
