"""Turn system errors into errors that users can fix: the path, the system's message and the remedy."""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from lmlong.errors import LmlongError, UsageError


class Remedy(NamedTuple):
    """The remedy of a system error, and the class of error to raise."""

    text: str
    kind: type[LmlongError] = LmlongError


_FULL = Remedy("Free some space, or choose a path on another disk.")
_DENIED = Remedy("Choose a path that you may write to, or ask its owner for permission.", UsageError)
_MISSING = Remedy("Correct the path, or make the folder.", UsageError)
_NO_FOLDER = Remedy("There is a file in place of a folder, or the reverse. Choose another path.", UsageError)
_BROKEN = Remedy("The disk or the connection to it fails. Try again, or choose another path.")

REMEDIES = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EFBIG: Remedy("Raise the limit of file sizes (ulimit -f), or choose another disk."),
    errno.EACCES: _DENIED,
    errno.EPERM: _DENIED,
    errno.EROFS: _DENIED,
    errno.ENOENT: _MISSING,
    errno.ENOTDIR: _NO_FOLDER,
    errno.EISDIR: _NO_FOLDER,
    errno.EEXIST: _NO_FOLDER,
    errno.ENAMETOOLONG: Remedy("Choose a shorter name.", UsageError),
    errno.ELOOP: Remedy("Its links lead in a circle. Choose another path.", UsageError),
    errno.EINVAL: Remedy("Choose an ordinary file or folder.", UsageError),
    errno.EIO: _BROKEN,
    errno.ESTALE: _BROKEN,
    errno.ENXIO: _BROKEN,
    errno.ENODEV: _BROKEN,
    errno.EMFILE: Remedy("Raise the limit of open files (ulimit -n)."),
    errno.ENFILE: Remedy("Close other programs, or raise the system's limit of open files."),
    errno.ENOMEM: Remedy("Close other programs, or use a machine with more memory."),
    errno.EAGAIN: Remedy("Raise the limit of processes (ulimit -u), or close other programs."),
    errno.EBADF: Remedy("It was closed. Redirect it to /dev/null instead."),
}
"""The remedy of each error that a user may cause. Any other error is a bug of lmlong, and shows its traceback."""

OUT_OF_MEMORY = ("DefaultCPUAllocator: can't allocate memory", "CUDA out of memory", "Unable to allocate")
"""Messages of torch and numpy when an allocation fails."""


def explain(error: OSError, path: Path | str | None = None, remedy: str | None = None) -> LmlongError | None:
    """Return the error for the user, about `path` or else the file that `error` names. None if it has no remedy."""
    known_remedy = REMEDIES.get(error.errno or 0)
    if known_remedy is None:
        return None
    name = error.filename if path is None else path
    if isinstance(name, bytes):
        name = name.decode(errors="replace")
    prefix = "" if name is None or isinstance(name, int) else f"{name}: "
    return known_remedy.kind(f"{prefix}{error.strerror or error}. {remedy or known_remedy.text}")


@contextmanager
def explain_errors(path: Path, remedy: str | None = None) -> Iterator[None]:
    """Name the file or folder being written in each system error, which often lacks it. An error about another file
    passes unchanged."""
    try:
        yield
    except OSError as error:
        explained = explain(error, path, remedy) if _concerns(error, path) else None
        if explained is None:
            raise
        raise explained from error


def _concerns(error: OSError, path: Path) -> bool:
    """Return whether an error is about a path, something beside or within it, or a folder above it."""
    if not isinstance(error.filename, str | bytes):
        return True
    named, path = Path(os.fsdecode(error.filename)).absolute(), path.absolute()
    return named.is_relative_to(path.parent) or path.is_relative_to(named)


def lack_of_memory(error: Exception) -> LmlongError | None:
    """Return the error for the user if an allocation failed, for which torch raises RuntimeError; else None."""
    text = str(error)
    if not isinstance(error, MemoryError) and not any(words in text for words in OUT_OF_MEMORY):
        return None
    size = re.search(r"allocate ([\d.,]+ ?(?:bytes|[KMGT]i?B))", text)
    return LmlongError(
        f"out of memory{f': {size[1]} could not be allocated' if size else ''}. Use a smaller model, batch or sequence "
        "(lmlong train --dry-run shows what fits), close other programs, or use a machine with more memory."
    )
