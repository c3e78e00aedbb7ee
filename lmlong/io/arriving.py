"""Bytes as they arrive: from a pipe, a file, or a file that grows as `tail -F` follows it."""

import os
import select
import stat
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

CHUNK = 1 << 16
POLL = 0.2
"""Seconds between looks at a file that grows."""

QUIET = b""
"""Stands for: nothing came for so long."""

LAST = 64
"""Bytes by which a file is known again."""

Waiting = Callable[[], AbstractContextManager[object]]
"""What it returns is entered for each wait, in which no byte is taken: an exception may end a wait without loss."""


@dataclass
class Place:
    """How far a file was read, and by which that file is known again: its number may be that of another one since."""

    device: int = 0
    inode: int = 0
    offset: int = 0
    last: str = ""  # the bytes before the offset, as hexadecimal

    def note(self, file: FileIO) -> None:
        """Remember how far an open file was read; a pipe cannot be read again."""
        about = os.fstat(file.fileno())
        if stat.S_ISREG(about.st_mode):
            self.device, self.inode, self.offset = about.st_dev, about.st_ino, file.tell()
            self.last = _before(file, self.offset).hex()

    def seek(self, file: FileIO) -> bool:
        """Go to the place in an open file if it is that one, and return whether it is."""
        about = os.fstat(file.fileno())
        if not self.inode or (about.st_dev, about.st_ino) != (self.device, self.inode) or about.st_size < self.offset:
            return False
        found = _before(file, self.offset).hex() == self.last
        file.seek(self.offset if found else 0)
        return found


def _before(file: FileIO, offset: int) -> bytes:
    """Return the bytes before an offset, and leave the file there."""
    file.seek(max(offset - LAST, 0))
    return file.read(min(offset, LAST))


def arriving(descriptor: int, quiet: float | None, waiting: Waiting = nullcontext) -> Iterator[bytes]:
    """Iterate over what comes from a file descriptor, as soon as it comes; QUIET once where `quiet` seconds pass
    without any. Where the system cannot wait for so long, as for pipes on Windows, it is not told."""
    told = True  # nothing came that could wait
    while True:
        with waiting():
            ready = _ready(descriptor, None if told else quiet)
        if ready is False:
            told = True
            yield QUIET
            continue
        with waiting() if ready is None else nullcontext():
            data = os.read(descriptor, CHUNK)
        if not data:
            return
        told = False
        yield data


def _ready(descriptor: int, seconds: float | None) -> bool | None:
    """Return whether there is something to read within so many seconds; None where the system cannot tell."""
    try:
        return bool(select.select([descriptor], [], [], seconds)[0])
    except InterruptedError:
        raise
    except (OSError, ValueError):
        return None


def follow(
    path: Path, quiet: float | None, poll: float = POLL, waiting: Waiting = nullcontext, place: Place | None = None
) -> Generator[bytes, None, None]:
    """Iterate over the bytes of a file and of what is appended to it, for ever; QUIET once where `quiet` seconds pass
    without any. A file that another one replaces is read to its end, then the other; one that was cut is read from its
    beginning; one that is gone is waited for. It begins at `place`, which is where it ended in the end."""
    place = place or Place()
    file, since, told = path.open("rb", buffering=0), time.monotonic(), True
    place.seek(file)
    try:
        while True:
            if data := file.read(CHUNK):
                since, told = time.monotonic(), False
                yield data
            elif (following := _another(path, file)) is not None:
                while data := file.read(CHUNK):  # what came before it was moved
                    yield data
                file.close()
                file = following
            elif os.fstat(file.fileno()).st_size < file.tell():
                file.seek(0)
            elif quiet is not None and not told and time.monotonic() - since >= quiet:
                told = True
                yield QUIET
            else:
                with waiting():
                    time.sleep(poll)
    finally:
        place.note(file)
        file.close()


def _another(path: Path, mine: FileIO) -> FileIO | None:
    """Return the file that a path leads to, opened, if that is another than mine; None too where there is none now."""
    with suppress(FileNotFoundError):
        there = path.stat()
        if (there.st_dev, there.st_ino) != _identity(mine):
            file = path.open("rb", buffering=0)
            if _identity(file) != _identity(mine):  # it may have been moved once more
                return file
            file.close()
    return None


def _identity(file: FileIO) -> tuple[int, int]:
    about = os.fstat(file.fileno())
    return about.st_dev, about.st_ino
