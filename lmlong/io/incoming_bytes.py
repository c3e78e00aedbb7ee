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
"""Yielded where nothing came for the `quiet` seconds."""

LAST = 64
"""Bytes by which a file is recognized."""

Waiting = Callable[[], AbstractContextManager[object]]
"""What it returns is entered for each wait, in which no byte is taken: an exception may end a wait without loss."""


@dataclass
class FilePosition:
    """How far a file was read, and its last bytes, as its inode may be that of another file since."""

    device: int = 0
    inode: int = 0
    offset: int = 0
    last: str = ""  # the bytes before the offset, as hexadecimal

    def note(self, file: FileIO) -> None:
        """Remember how far an open file was read; a pipe cannot be read again."""
        status = os.fstat(file.fileno())
        if stat.S_ISREG(status.st_mode):
            self.device, self.inode, self.offset = status.st_dev, status.st_ino, file.tell()
            self.last = _before(file, self.offset).hex()

    def seek(self, file: FileIO) -> bool:
        """Go to the position in an open file if it is of that file, and return whether it is."""
        status = os.fstat(file.fileno())
        is_inode = self.inode and (status.st_dev, status.st_ino) == (self.device, self.inode)
        if not is_inode or status.st_size < self.offset:
            return False
        is_file = _before(file, self.offset).hex() == self.last
        file.seek(self.offset if is_file else 0)
        return is_file


def _before(file: FileIO, offset: int) -> bytes:
    """Return the bytes before an offset, and leave the file there."""
    file.seek(max(offset - LAST, 0))
    return file.read(min(offset, LAST))


def read_available(descriptor: int, quiet: float | None, waiting: Waiting = nullcontext) -> Iterator[bytes]:
    """Iterate over what comes from a file descriptor, as soon as it comes; QUIET once where `quiet` seconds pass
    without any. Where the system cannot wait with a limit, as for pipes on Windows, QUIET does not come."""
    is_quiet = True  # nothing came that could wait
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
    """Return whether there is something to read within these seconds; None where the system cannot wait for that."""
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
    """Iterate over the bytes of a file and of what is appended to it, indefinitely; QUIET once where `quiet` seconds
    pass without any. A file that another one replaces is read to its end, then the other; one that was truncated is
    read from its beginning; one that was removed is waited for. It begins at `position`, which is updated at the end.
    """
    position = position or FilePosition()
    file, since, is_quiet = path.open("rb", buffering=0), time.monotonic(), True
    position.seek(file)
    try:
        while True:
            if data := file.read(CHUNK):
                since, is_quiet = time.monotonic(), False
                yield data
            elif (replacement := _replacement(path, file)) is not None:
                while data := file.read(CHUNK):  # what came before it was moved
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
    """Return the file at a path, opened, if it is another one than `file`; None too where there is none now."""
    with suppress(FileNotFoundError):
        if not os.path.samestat(path.stat(), os.fstat(file.fileno())):
            other = path.open("rb", buffering=0)
            if not os.path.samestat(os.fstat(other.fileno()), os.fstat(file.fileno())):  # it may have been moved again
                return other
            other.close()
    return None
