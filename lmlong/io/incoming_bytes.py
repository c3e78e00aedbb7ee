"""Read bytes as they arrive, from a pipe, a file, or a growing file like `tail -F`."""

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
"""Seconds between checks of a growing file."""

QUIET = b""
"""Yielded when no bytes arrive for `quiet` seconds."""

FINGERPRINT_SIZE = 64
"""How many bytes before a position identify a file."""

Waiting = Callable[[], AbstractContextManager[object]]
"""Returns a context that is entered for each wait. No bytes are read in it, so an exception may end a wait without
loss."""


@dataclass
class FilePosition:
    """How far a file was read. The last bytes identify the file, since its inode may have been reused."""

    device: int = 0
    inode: int = 0
    offset: int = 0
    last: str = ""  # the bytes before the offset, as hexadecimal

    def note(self, file: FileIO) -> None:
        """Store how far an open file was read. A pipe, which cannot be read again, is ignored."""
        status = os.fstat(file.fileno())
        if stat.S_ISREG(status.st_mode):
            self.device, self.inode, self.offset = status.st_dev, status.st_ino, file.tell()
            self.last = _before(file, self.offset).hex()

    def seek(self, file: FileIO) -> bool:
        """Seek to the position if it belongs to this open file; return whether it does."""
        status = os.fstat(file.fileno())
        is_inode = self.inode and (status.st_dev, status.st_ino) == (self.device, self.inode)
        if not is_inode or status.st_size < self.offset:
            return False
        is_file = _before(file, self.offset).hex() == self.last
        file.seek(self.offset if is_file else 0)
        return is_file


def _before(file: FileIO, offset: int) -> bytes:
    """Return the bytes before an offset, and leave the file at the offset."""
    file.seek(max(offset - FINGERPRINT_SIZE, 0))
    return file.read(min(offset, FINGERPRINT_SIZE))


def read_available(descriptor: int, quiet: float | None, waiting: Waiting = nullcontext) -> Iterator[bytes]:
    """Yield bytes from a file descriptor as soon as they arrive, and QUIET once after `quiet` seconds without any.
    Never yields QUIET if the system cannot wait with a timeout, as for pipes on Windows."""
    is_quiet = True  # no bytes since the last QUIET
    while True:
        with waiting():
            ready = _ready(descriptor, None if is_quiet else quiet)
        if ready is False:
            is_quiet = True
            yield QUIET
            continue
        with waiting() if ready is None else nullcontext():
            data = os.read(descriptor, CHUNK)
        if not data:
            return
        is_quiet = False
        yield data


def _ready(descriptor: int, seconds: float | None) -> bool | None:
    """Return whether bytes arrive within these seconds. None if the system cannot wait with a timeout."""
    try:
        return bool(select.select([descriptor], [], [], seconds)[0])
    except InterruptedError:
        raise
    except (OSError, ValueError):
        return None


def follow_file(
    path: Path,
    quiet: float | None,
    poll: float = POLL,
    waiting: Waiting = nullcontext,
    position: FilePosition | None = None,
) -> Generator[bytes, None, None]:
    """Yield the bytes of a file and all bytes appended to it, indefinitely. Yield QUIET once after `quiet` seconds
    without any. If another file replaces it, read the old file to its end, then the new one. If it is truncated, read
    it from its beginning. If it is removed, wait for a new one. Begin at `position`, and update it at the end."""
    position = position or FilePosition()
    file, since, is_quiet = path.open("rb", buffering=0), time.monotonic(), True
    position.seek(file)
    try:
        while True:
            if data := file.read(CHUNK):
                since, is_quiet = time.monotonic(), False
                yield data
            elif (replacement := _replacement(path, file)) is not None:
                while data := file.read(CHUNK):  # bytes written before it was moved
                    yield data
                file.close()
                file = replacement
            elif os.fstat(file.fileno()).st_size < file.tell():
                file.seek(0)
            elif quiet is not None and not is_quiet and time.monotonic() - since >= quiet:
                is_quiet = True
                yield QUIET
            else:
                with waiting():
                    time.sleep(poll)
    finally:
        position.note(file)
        file.close()


def _replacement(path: Path, file: FileIO) -> FileIO | None:
    """Open the file at a path if it is not `file`. None if it is, or if the path does not exist."""
    with suppress(FileNotFoundError):
        if not os.path.samestat(path.stat(), os.fstat(file.fileno())):
            replacement = path.open("rb", buffering=0)
            if not os.path.samestat(os.fstat(replacement.fileno()), os.fstat(file.fileno())):  # may have moved again
                return replacement
            replacement.close()
    return None
