"""Errors of the system as errors that a user can mend: the path, what the system says, and the remedy."""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from lmlong.errors import LmlongError, UsageError


class Remedy(NamedTuple):
    """What mends an error of the system, and the kind of error that it is to a user."""

    text: str
    kind: type[LmlongError] = LmlongError


_FULL = Remedy("Free some space, or choose a place on another disk.")
_DENIED = Remedy("Choose a place that you may write to, or ask its owner for permission.", UsageError)
_MISSING = Remedy("Correct the path, or make the folder.", UsageError)
_NO_FOLDER = Remedy("A file stands where a folder is needed, or the reverse. Choose another path.", UsageError)
_BROKEN = Remedy("The disk or the connection to it fails. Try again, or choose another place.")

REMEDIES = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EFBIG: Remedy("Files may not be larger here: raise the limit (ulimit -f), or choose another disk."),
    errno.EACCES: _DENIED,
    errno.EPERM: _DENIED,
    errno.EROFS: _DENIED,
    errno.ENOENT: _MISSING,
    errno.ENOTDIR: _NO_FOLDER,
    errno.EISDIR: _NO_FOLDER,
    errno.EEXIST: _NO_FOLDER,
    errno.ENAMETOOLONG: Remedy("Choose a shorter name.", UsageError),
    errno.ELOOP: Remedy("Its links lead in a circle. Choose another path.", UsageError),
    errno.EINVAL: Remedy("It cannot be used so. Choose an ordinary file or folder.", UsageError),
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
"""The remedy of each error that a user may meet; any other is a fault of lmlong, whose traceback is worth having."""

OUT_OF_MEMORY = ("DefaultCPUAllocator: can't allocate memory", "CUDA out of memory", "Unable to allocate")
"""What torch and numpy say when memory cannot be had."""


def explain(error: OSError, path: Path | str | None = None, remedy: str | None = None) -> LmlongError | None:
    """Return the error for the user, about `path` or the file that it names; None where it is not the user's."""
    known = REMEDIES.get(error.errno or 0)
    if known is None:
        return None
    name = error.filename if path is None else path
    if isinstance(name, bytes):
        name = name.decode(errors="replace")
    prefix = "" if name is None or isinstance(name, int) else f"{name}: "
    return known.kind(f"{prefix}{error.strerror or error}. {remedy or known.text}")


@contextmanager
def explain_errors(path: Path, remedy: str | None = None) -> Iterator[None]:
    """Name the file or folder that is written to in each error of the system, which often does not. An error about
    another file passes unchanged."""
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
    """Return the error for the user where memory could not be had; torch raises a RuntimeError for it."""
    text = str(error)
    if not isinstance(error, MemoryError) and not any(words in text for words in OUT_OF_MEMORY):
        return None
    size = re.search(r"allocate ([\d.,]+ ?(?:bytes|[KMGT]i?B))", text)
    return LmlongError(
        f"out of memory{f', which was to be {size[1]} more' if size else ''}. Make model, batch or sequence smaller "
        "(lmlong train --dry-run --memory shows what fits), close other programs, or use a machine with more memory."
    )
