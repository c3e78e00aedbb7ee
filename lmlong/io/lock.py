"""File locks that are released when the process that holds them ends, however it ends."""

import errno
import json
import os
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from lmlong.io.files import parse_json
from lmlong.io.locking import lock

UNSUPPORTED = {errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK}
"""Errors of file systems without locks."""


OPENED = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
"""How a lock file is opened; Windows has only the last of these, and the others not that."""


class Holder(NamedTuple):
    """The holder of a lock, as far as the file says."""

    pid: int | None
    host: str | None

    def __str__(self) -> str:
        return f"process {self.pid or 'unknown'} on {self.host or 'an unknown machine'}"


OURS = b'{"pid"'
"""The first bytes of a lock file; a file that begins otherwise belongs to the user."""


class Held(Exception):
    """Another process holds the lock."""

    def __init__(self, holder: Holder):
        super().__init__(str(holder))
        self.holder = holder


class Lock:
    """A lock on a file, whose content names the holder. The file is removed when the lock is released.

    Use it as `with Lock(path): ...`. Where another process holds it, `Held` is raised, or with `waiting` that text is
    printed and the lock waited for. Where the file system has no locks nobody is kept out, and `works` is false.
    """

    def __init__(self, path: Path, waiting: str | None = None):
        self.path, self.waiting = path, waiting
        self.works = True
        self._descriptor: int | None = None

    def __enter__(self) -> "Lock":
        while True:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, OPENED, 0o666)
            try:
                self._lock(descriptor)
                if not self._is_still_there(descriptor):  # the holder removed it while this process waited
                    os.close(descriptor)
                    continue
                if not (_read(descriptor, len(OURS)) or OURS).startswith(OURS):
                    raise FileExistsError(errno.EEXIST, "a file of that name is no lock of lmlong", str(self.path))
                os.ftruncate(descriptor, 0)
                me = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
                os.lseek(descriptor, 0, os.SEEK_SET)
                os.write(descriptor, (json.dumps(me) + "\n").encode())
            except BaseException:
                os.close(descriptor)
                raise
            self._descriptor = descriptor
            return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._descriptor is not None
        if os.name == "nt":  # no file is removed there while it is open, neither here nor where another waits for it
            os.close(self._descriptor)
            with suppress(PermissionError):
                self.path.unlink()
        else:
            if self._is_still_there(self._descriptor):
                self.path.unlink()
            os.close(self._descriptor)
        self._descriptor = None

    def _lock(self, descriptor: int) -> None:
        try:
            if lock(descriptor, wait=False):
                return
            holder = _holder(descriptor)
            if self.waiting is None:
                raise Held(holder)
            print(f"{self.waiting}: waiting for {holder}", file=sys.stderr, flush=True)
            lock(descriptor, wait=True)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            self.works = False

    def _is_still_there(self, descriptor: int) -> bool:
        try:
            there, held = self.path.stat(), os.fstat(descriptor)
        except FileNotFoundError:
            return False
        return (there.st_dev, there.st_ino) == (held.st_dev, held.st_ino)


def _read(descriptor: int, size: int) -> bytes:
    """Return the first bytes of an open file."""
    os.lseek(descriptor, 0, os.SEEK_SET)
    return os.read(descriptor, size)


def _holder(descriptor: int) -> Holder:
    """Return who holds the lock. One who has just taken it is given half a second to write that."""
    for _ in range(50):
        try:
            known: Any = parse_json(_read(descriptor, 4096))
            return Holder(int(known["pid"]), str(known["host"]))
        except (ValueError, KeyError, TypeError):
            time.sleep(0.01)
    return Holder(None, None)
