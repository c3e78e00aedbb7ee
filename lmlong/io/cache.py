"""A cache of folders: made once, by one process at a time, and made again where they are damaged."""

import os
import shutil
import socket
import stat
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from json import dumps
from pathlib import Path
from typing import Any

from lmlong.errors import UsageError
from lmlong.io import files, manifest
from lmlong.io.home import NO_HOME, home_cache
from lmlong.io.lock import Held, Lock
from lmlong.io.manifest import Damaged, Format
from lmlong.io.system_errors import named
from lmlong.io.trust import is_private

UNFINISHED = "unfinished-"
"""Prefix of the name of a folder that is being made."""

RESUMABLE = "resumable"
"""Suffix of its name where the work can go on after it was cut off, in place of the number of the process."""

PROGRESS = "progress.json"
"""A file in a folder that is being made by which the work can go on. Such a folder is kept where the work is cut off,
and given to `make` again."""

KEPT = 7 * 24 * 3600
"""Seconds for which it is kept after the file was last written."""

REMEDY = "Set LMLONG_CACHE to a folder of your own with free space, or ask the owner of this one for permission."

REMEMBERED = 1 << 24
"""Size from which a file is hashed only once on a machine, as long as its times do not change."""


def cache_folder() -> Path:
    """Return the folder of the cache: $LMLONG_CACHE, or ~/.cache/lmlong."""
    chosen = os.environ.get("LMLONG_CACHE")
    if not chosen:
        return home_cache()
    if (expanded := os.path.expanduser(chosen)).startswith("~"):
        raise UsageError(f"LMLONG_CACHE: {chosen} begins with no home that there is. Give another folder.")
    return Path(expanded)


def key_of(*content: Any) -> str:
    """Return a short hash of all that a cached result depends on, in plain values."""
    return sha256(dumps(content).encode()).hexdigest()[:32]


def fetch(
    folder: Path, form: Format, make: Callable[[Path], None], private: bool = False, resumable: bool = False
) -> Path:
    """Return a folder of the cache, made by `make` unless it is there and whole.

    Processes that want the same one wait for the first. With `private` no other user can write to it, whatever the
    umask. With `resumable` `make` may find what it left when it was cut off, and goes on.
    """
    if folder.is_relative_to(NO_HOME):
        raise UsageError("you have no home to keep the cache in. Set LMLONG_CACHE to a folder of your own.")
    with named(folder, REMEDY):
        if not _whole(folder, form, private):
            with Lock(_lock_of(folder), waiting=str(folder)) as lock:
                if not _whole(folder, form, private, silent=True):
                    _sweep(folder.parent, folder.name, lock)
                    # without locks another process might make the same folder at the same time
                    owner = RESUMABLE if resumable and lock.works else str(os.getpid())
                    _replace(folder, form, make, private, owner)
    return folder


def _whole(folder: Path, form: Format, private: bool, silent: bool = False) -> bool:
    """Return whether a folder is there and whole and, where it must be `private`, writable by this user alone."""
    if not folder.is_dir():
        return False
    try:
        manifest.verify(folder, form, check=_has_digest)
        if private and not all(is_private(path) for path in (folder, *folder.iterdir())):
            raise Damaged(f"{folder}: others can write to it.")
        return True
    except Damaged as damaged:
        if not silent:
            print(f"{damaged} It is made again.", file=sys.stderr)
        return False


def _replace(folder: Path, form: Format, make: Callable[[Path], None], private: bool, owner: str) -> None:
    """Make a temporary folder beside it, then rename it; a folder already there is damaged, and is removed."""
    staged = folder.with_name(f"{UNFINISHED}{folder.name}-{owner}")
    staged.mkdir(exist_ok=owner == RESUMABLE)
    try:
        if private:
            staged.chmod(stat.S_IMODE(staged.stat().st_mode) & ~0o022)
        make(staged)
        manifest.seal(staged, form, {})
        for path in staged.iterdir() if private else ():
            path.chmod(stat.S_IMODE(path.stat().st_mode) & ~0o022)
        if folder.is_symlink() or folder.is_file():
            folder.unlink()
        elif folder.exists():
            # others may be reading it: their open files stay valid
            damaged = folder.with_name(f"{UNFINISHED}{folder.name}-damaged")
            shutil.rmtree(damaged, ignore_errors=True)
            folder.rename(damaged)
            shutil.rmtree(damaged, ignore_errors=True)
        try:
            staged.rename(folder)
        except OSError:
            if not folder.is_dir():  # where no lock works another process may have been faster
                raise
        files.fsync(folder.parent)
    finally:
        if not _can_go_on(staged):
            shutil.rmtree(staged, ignore_errors=True)


def _can_go_on(staged: Path) -> bool:
    """Return whether the work on a folder can go on from where it was cut off, and that is not too long ago."""
    try:
        return staged.name.endswith(RESUMABLE) and time.time() - (staged / PROGRESS).stat().st_mtime < KEPT
    except OSError:
        return False


def _sweep(parent: Path, name: str, lock: Lock) -> None:
    """Remove the leftovers of processes that died while they made a folder: those alive hold its lock."""
    if not lock.works:
        return
    for path in parent.glob(f"{UNFINISHED}*"):
        if _can_go_on(path):
            continue
        other = path.name.removeprefix(UNFINISHED).rpartition("-")[0]
        if other == name:
            shutil.rmtree(path, ignore_errors=True)
            continue
        try:
            with Lock(_lock_of(parent / other)):
                shutil.rmtree(path, ignore_errors=True)
        except (Held, OSError):
            continue


def _lock_of(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.lock")


def _has_digest(path: Path, digest: str) -> bool:
    """Return whether a file has a sha256; a large one is hashed once on this machine, and again when it is touched."""
    found = path.stat()
    if found.st_size < REMEMBERED:
        return files.sha256(path) == digest
    identity = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    known = home_cache() / "digests" / key_of(socket.gethostname(), str(path.resolve()), *identity, digest)
    if known.exists():
        return True
    if files.sha256(path) != digest:
        return False
    with suppress(OSError):  # without a home to write to it is hashed each time
        known.parent.mkdir(parents=True, exist_ok=True)
        known.touch()
    return True
