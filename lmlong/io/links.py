"""A link to a folder beside it: symbolic, or a small file with the folder's name where there are no symbolic links."""

import errno
import os
from pathlib import Path

POINTER = b"lmlong link to "
"""The first bytes of a file that stands for a link."""

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
    """Return the folder that a link names; any other path as it is."""
    name = _name(path)
    return path if name is None else path.with_name(name)


def is_link(path: Path) -> bool:
    return path.is_symlink() or _name(path) is not None


def _symlink(link: Path, name: str) -> bool:
    """Make a symbolic link; False where there are none. Those of Windows need a privilege, and replace no other."""
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
    """Return the name in a file that stands for a link."""
    if path.is_symlink() or not path.is_file():
        return None
    with path.open("rb") as file:
        content = file.read(len(POINTER) + 256)
    name = content.removeprefix(POINTER).decode(errors="replace")
    return name if content.startswith(POINTER) and Path(name).name == name else None
