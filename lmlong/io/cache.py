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
from lmlong.io import files, folder_manifest
from lmlong.io.folder_manifest import DamagedFolder, Format
from lmlong.io.home import NO_HOME, home_cache
from lmlong.io.lock import Held, Lock
from lmlong.io.system_errors import explain_errors
from lmlong.io.trust import is_private

UNFINISHED = "unfinished-"
"""Prefix of the name of a folder that is being made."""

RESUMABLE = "resumable"
"""Suffix of its name where the work can be resumed after it was cut off, in place of the number of the process."""

PROGRESS = "progress.json"
"""A file in a folder that is being made by which the work can be resumed. Such a folder is kept where the work is cut
off, and given to `make` again."""

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


def check_home(folder: Path, content: str) -> None:
    """Refuse a folder of the cache where the user has no home for it."""
    if folder.is_relative_to(NO_HOME):
        raise UsageError(f"you have no home to keep {content} in. Set LMLONG_CACHE to a folder of your own.")


def key_of(*content: Any) -> str:
    """Return a short hash of all that a cached result depends on, in plain values."""
    return sha256(dumps(content).encode()).hexdigest()[:32]


def fetch(
    folder: Path, form: Format, make: Callable[[Path], None], private: bool = False, resumable: bool = False
) -> Path:
    """Return a folder of the cache, made by `make` if it is missing or damaged.

    Processes that want the same one wait for the first. With `private` no other user can write to it, whatever the
    umask. With `resumable` `make` may find what it left when it was cut off, and continues.
    """
    check_home(folder, "the cache")
    with explain_errors(folder, REMEDY):
        if not _is_whole(folder, form, private):
            with Lock(_lock_of(folder), waiting=str(folder)) as lock:
                if not _is_whole(folder, form, private, silent=True):
                    if lock.works:
                        _sweep(folder)
                    # without locks another process might make the same folder at the same time
                    owner = RESUMABLE if resumable and lock.works else str(os.getpid())
                    _make(folder, form, make, private, owner)
    return folder


def _is_whole(folder: Path, form: Format, private: bool, silent: bool = False) -> bool:
    """Return whether a folder exists undamaged and, where it must be `private`, is writable by this user alone."""
    if not folder.is_dir():
        return False
    try:
        folder_manifest.verify(folder, form, check=_has_digest)
        if private and not all(is_private(path) for path in (folder, *folder.iterdir())):
            raise DamagedFolder(f"{folder}: others can write to it.")
        return True
    except DamagedFolder as damaged:
        if not silent:
            print(f"{damaged} It is made again.", file=sys.stderr)
        return False


def _make(folder: Path, form: Format, make: Callable[[Path], None], private: bool, owner: str) -> None:
    """Make a temporary folder beside it, then rename it; a folder already there is damaged, and is removed."""
    staged = _unfinished(folder, owner)
    staged.mkdir(exist_ok=owner == RESUMABLE)
    try:
        if private:
            _deny_others(staged)
        make(staged)
        folder_manifest.seal(staged, form, {})
        if private:
            _deny_others(*staged.iterdir())
        _remove_damaged(folder)
        try:
            staged.rename(folder)
        except OSError:
            if not folder.is_dir():  # where no lock works another process may have been faster
                raise
        files.fsync(folder.parent)
    finally:
        if not _is_resumable(staged):
            shutil.rmtree(staged, ignore_errors=True)


def _deny_others(*paths: Path) -> None:
    """Let nobody but the owner write to files and folders."""
    for path in paths:
        path.chmod(stat.S_IMODE(path.stat().st_mode) & ~0o022)


def _remove_damaged(folder: Path) -> None:
    if folder.is_symlink() or folder.is_file():
        folder.unlink()
    elif folder.exists():
        # others may be reading it: their open files stay valid
        damaged = _unfinished(folder, "damaged")
        shutil.rmtree(damaged, ignore_errors=True)
        folder.rename(damaged)
        shutil.rmtree(damaged, ignore_errors=True)


def _unfinished(folder: Path, owner: str) -> Path:
    return folder.with_name(f"{UNFINISHED}{folder.name}-{owner}")


def _is_resumable(staged: Path) -> bool:
    """Return whether the work on a folder can be resumed, and was cut off not too long ago."""
    try:
        return staged.name.endswith(RESUMABLE) and time.time() - (staged / PROGRESS).stat().st_mtime < KEPT
    except OSError:
        return False


def _sweep(folder: Path) -> None:
    """Remove the leftovers of processes that died while they made a folder: those alive hold its lock."""
    for path in folder.parent.glob(f"{UNFINISHED}*"):
        if _is_resumable(path):
            continue
        name = path.name.removeprefix(UNFINISHED).rpartition("-")[0]
        if name == folder.name:  # whose lock this process holds
            shutil.rmtree(path, ignore_errors=True)
            continue
        with suppress(Held, OSError), Lock(_lock_of(folder.with_name(name))):
            shutil.rmtree(path, ignore_errors=True)


def _lock_of(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.lock")


def _has_digest(path: Path, digest: str) -> bool:
    """Return whether a file has a sha256; a large one is hashed once on this machine, and again when it is touched."""
    status = path.stat()
    if status.st_size < REMEMBERED:
        return files.sha256(path) == digest
    identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    seen = home_cache() / "digests" / key_of(socket.gethostname(), str(path.resolve()), *identity, digest)
    if seen.exists():
        return True
    if files.sha256(path) != digest:
        return False
    with suppress(OSError):  # without a home to write to it is hashed each time
        seen.parent.mkdir(parents=True, exist_ok=True)
        seen.touch()
    return True
