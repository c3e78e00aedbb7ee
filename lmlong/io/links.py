"""Links to a folder beside them: symbolic, or a small file with the folder's name if symbolic links are missing."""

import errno
import os
from pathlib import Path

POINTER = b"lmlong link to "
"""The first bytes of a file that replaces a symbolic link."""

NO_LINKS = {errno.EPERM, errno.ENOSYS, errno.ENOTSUP}
"""Errors of file systems without symbolic links."""


def point_link(link: Path, folder: Path) -> None:
    """Point a link to a folder beside it, atomically."""
    new = link.with_name(f".{link.name}.partial")
    new.unlink(missing_ok=True)
    if not _symlink(new, folder.name):
        new.write_bytes(POINTER + folder.name.encode())
    new.replace(link)


def follow_link(path: Path) -> Path:
    """Return the folder that a link names. Return any other path unchanged."""
    name = _name(path)
    return path if name is None else path.with_name(name)


def is_link(path: Path) -> bool:
    return path.is_symlink() or _name(path) is not None


def _symlink(link: Path, name: str) -> bool:
    """Make a symbolic link. Return False if the file system has none, or on Windows, where they need a privilege and
    cannot replace another link."""
    if os.name == "nt":
        return False
    try:
        link.symlink_to(name)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        return False
    return True


def _name(path: Path) -> str | None:
    """Return the folder name in a file that replaces a symbolic link."""
    if path.is_symlink() or not path.is_file():
        return None
    with path.open("rb") as file:
        content = file.read(len(POINTER) + 256)
    name = content.removeprefix(POINTER).decode(errors="replace")
    return name if content.startswith(POINTER) and Path(name).name == name else None
