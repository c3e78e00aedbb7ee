"""A cache of folders: made once, by one process at a time, and made again where they are damaged."""

import os
import shutil
import socket
import stat
import sys
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


def fetch(folder: Path, form: Format, make: Callable[[Path], None], private: bool = False) -> Path:
    """Return a folder of the cache, made by `make` unless it is there and whole.

    Processes that want the same one wait for the first. With `private` no other user can write to it, whatever the
    umask.
    """
    if folder.is_relative_to(NO_HOME):
        raise UsageError("you have no home to keep the cache in. Set LMLONG_CACHE to a folder of your own.")
    with named(folder, REMEDY):
        if not _whole(folder, form, private):
            with Lock(_lock_of(folder), waiting=str(folder)) as lock:
                if not _whole(folder, form, private, silent=True):
                    _sweep(folder.parent, folder.name, lock)
                    _replace(folder, form, make, private)
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


def _replace(folder: Path, form: Format, make: Callable[[Path], None], private: bool) -> None:
    """Make a temporary folder beside it, then rename it; a folder already there is damaged, and is removed."""
    staged = folder.with_name(f"{UNFINISHED}{folder.name}-{os.getpid()}")
    staged.mkdir()
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
        shutil.rmtree(staged, ignore_errors=True)


def _sweep(parent: Path, name: str, lock: Lock) -> None:
    """Remove the leftovers of processes that died while they made a folder: those alive hold its lock."""
    if not lock.works:
        return
    for path in parent.glob(f"{UNFINISHED}*"):
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
