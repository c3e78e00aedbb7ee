"""Bytes as they arrive: from a pipe, a file, or a file that grows as `tail -F` follows it."""

import os
import select
import time
from collections.abc import Iterator
from pathlib import Path

CHUNK = 1 << 16
POLL = 0.2
"""Seconds between looks at a file that grows."""

QUIET = b""
"""Stands for: nothing came for so long."""


def arriving(descriptor: int, quiet: float | None) -> Iterator[bytes]:
    """Iterate over what comes from a file descriptor, as soon as it comes; QUIET once where `quiet` seconds pass
    without any. Where the system cannot wait for so long, as for pipes on Windows, it is not told."""
    told = True  # nothing came that could wait
    while True:
        if quiet is not None and not told and not _ready(descriptor, quiet):
            told = True
            yield QUIET
            continue
        data = os.read(descriptor, CHUNK)
        if not data:
            return
        told = False
        yield data


def _ready(descriptor: int, seconds: float) -> bool:
    try:
        return bool(select.select([descriptor], [], [], seconds)[0])
    except (OSError, ValueError):
        return True


def follow(path: Path, quiet: float | None, poll: float = POLL) -> Iterator[bytes]:
    """Iterate over the bytes of a file and of what is appended to it, for ever; QUIET once where `quiet` seconds pass
    without any. A file that another one replaces is read to its end, then the other; one that was cut is read from its
    beginning; one that is gone is waited for."""
    file, since, told = path.open("rb", buffering=0), time.monotonic(), True
    try:
        while True:
            if data := file.read(CHUNK):
                since, told = time.monotonic(), False
                yield data
                continue
            if _is_another(path, file.fileno()):
                while data := file.read(CHUNK):  # what came before it was moved
                    yield data
                following = path.open("rb", buffering=0)
                file.close()
                file = following
                continue
            if os.fstat(file.fileno()).st_size < file.tell():
                file.seek(0)
                continue
            if quiet is not None and not told and time.monotonic() - since >= quiet:
                told = True
                yield QUIET
                continue
            time.sleep(poll)
    finally:
        file.close()


def _is_another(path: Path, descriptor: int) -> bool:
    """Return whether a path leads to another file than the open one."""
    try:
        there, mine = path.stat(), os.fstat(descriptor)
    except FileNotFoundError:
        return False
    return (there.st_dev, there.st_ino) != (mine.st_dev, mine.st_ino)
