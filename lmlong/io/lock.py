"""File locks that the system releases when the process that holds them ends, even after a crash.

They use flock, or a locked byte on Windows.
"""

import errno
import json
import os
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from lmlong.io.files import parse_json

fcntl: Any = None
msvcrt: Any = None
try:
    import fcntl
except ImportError:
    import msvcrt

UNSUPPORTED = {errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK}
"""Errors of file systems without locks."""

OPEN_FLAGS = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
"""Flags to open a lock file. Windows lacks O_NOFOLLOW; other systems lack O_BINARY."""

LOCK_FILE_START = b'{"pid"'
"""The first bytes of a lock file. A file that begins otherwise is not a lock file, and is not overwritten."""

LOCKED_BYTE = 1 << 30
"""Offset of the byte that is locked on Windows, where a locked byte cannot be read. It is far beyond the holder's name,
which other processes read."""


class Held(Exception):
    """Another process holds the lock. The message names it."""


class Lock:
    """A lock on a file, whose content names the holder. The file is removed when the lock is released.

    Use it as `with Lock(path): ...`. If another process holds the lock, raise `Held`, or with `waiting` print that text
    and wait. If the file system has no locks, `works` is False and no process is excluded.
    """

    def __init__(self, path: Path, waiting: str | None = None):
        self.path, self.waiting = path, waiting
        self.works = True
        self._descriptor: int | None = None

    def __enter__(self) -> "Lock":
        while self._descriptor is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, OPEN_FLAGS, 0o666)
            try:
                self._acquire(descriptor)
                if self._is_at_path(descriptor):  # otherwise the holder removed it while this process waited
                    self._write_holder(descriptor)
                    self._descriptor = descriptor
            finally:
                if self._descriptor is None:
                    os.close(descriptor)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._descriptor is not None
        if os.name == "nt":  # Windows removes no open file: close it first; a waiting process may also have it open
            os.close(self._descriptor)
            with suppress(PermissionError):
                self.path.unlink()
        else:
            if self._is_at_path(self._descriptor):
                self.path.unlink()
            os.close(self._descriptor)
        self._descriptor = None

    def _acquire(self, descriptor: int) -> None:
        try:
            if lock_file(descriptor, wait=False):
                return
            holder = _read_holder(descriptor)
            if self.waiting is None:
                raise Held(holder)
            print(f"{self.waiting}: waiting for {holder}", file=sys.stderr, flush=True)
            lock_file(descriptor, wait=True)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            self.works = False

    def _is_at_path(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(self.path.stat(), os.fstat(descriptor))
        except FileNotFoundError:
            return False

    def _write_holder(self, descriptor: int) -> None:
        if not (_read(descriptor, len(LOCK_FILE_START)) or LOCK_FILE_START).startswith(LOCK_FILE_START):
            raise FileExistsError(errno.EEXIST, "exists and is not a lock file of lmlong", str(self.path))
        os.ftruncate(descriptor, 0)
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        os.lseek(descriptor, 0, os.SEEK_SET)
        os.write(descriptor, (json.dumps(holder) + "\n").encode())


def lock_file(descriptor: int, wait: bool) -> bool:
    """Lock an open file. Return False if another process holds it and `wait` is False."""
    while True:
        try:
            if fcntl:
                fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            else:
                os.lseek(descriptor, LOCKED_BYTE, os.SEEK_SET)
                msvcrt.locking(descriptor, msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
            return True
        except OSError as error:
            # LK_LOCK of Windows gives up after 10 s; flock without waiting raises BlockingIOError
            if fcntl and not isinstance(error, BlockingIOError):
                raise
            if not wait:
                return False


def _read(descriptor: int, size: int) -> bytes:
    """Return the first bytes of an open file."""
    os.lseek(descriptor, 0, os.SEEK_SET)
    return os.read(descriptor, size)


def _read_holder(descriptor: int) -> str:
    """Return who holds a lock. Wait up to half a second for a new holder to write its name."""
    for _ in range(50):
        try:
            holder: Any = parse_json(_read(descriptor, 4096))
            return f"process {int(holder['pid'])} on {holder['host']}"
        except (ValueError, KeyError, TypeError):
            time.sleep(0.01)
    return "process unknown on an unknown machine"
