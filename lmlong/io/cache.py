"""A cache of folders: each is built once, by one process at a time, and rebuilt if it is damaged."""

import os
import re
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
from lmlong.io.lock import Held, lock
from lmlong.io.system_errors import explain_errors
from lmlong.io.trust import is_private

UNFINISHED = "unfinished-"
"""Prefix of the name of a folder that is being built."""

RESUMABLE = "resumable"
"""Suffix of the name if the work can be resumed; otherwise the suffix is the process id."""

DAMAGED = "damaged"
"""Suffix of the name of a damaged folder that is being removed."""

KEY = re.compile("[0-9a-f]{32}")
"""What `key_of` returns."""

PROGRESS = "progress.json"
"""File from which interrupted work is resumed. A folder that holds it is kept and passed to `make` again."""

RESUMABLE_FOR = 7 * 24 * 3600
"""Seconds after the last write to PROGRESS for which the folder is kept."""

REMEDY = "Set LMLONG_CACHE to a folder of your own with free space, or ask the owner of this one for permission."

REMEMBERED = 1 << 24
"""Bytes from which a file's verified digest is remembered on this machine until the file's times change."""


LEFT = re.compile(rf"{UNFINISHED}(?P<name>{KEY.pattern})-(\d+|{RESUMABLE}|{DAMAGED})")
"""The names of unfinished and of damaged folders. All others belong to somebody else."""


def cache_folder() -> Path:
    """Return the folder of the cache: $LMLONG_CACHE, or ~/.cache/lmlong."""
    chosen = os.environ.get("LMLONG_CACHE")
    if not chosen:
        return home_cache()
    if (expanded := os.path.expanduser(chosen)).startswith("~"):
        raise UsageError(f"LMLONG_CACHE: the home folder in {chosen} does not exist. Give another folder.")
    return Path(expanded)


def check_home(folder: Path, content: str) -> None:
    """Raise UsageError if a folder of the cache needs a home folder and the user has none."""
    if folder.is_relative_to(NO_HOME):
        raise UsageError(f"there is no home folder for {content}. Set LMLONG_CACHE to a folder of your own.")


def key_of(*content: Any) -> str:
    """Return a short hash of the plain values that a cached result depends on."""
    return sha256(dumps(content).encode()).hexdigest()[:32]


def fetch(
    folder: Path,
    form: Format,
    make: Callable[[Path], None],
    private: bool = False,
    resumable: bool = False,
    check: Callable[[Path], object] | None = None,
) -> Path:
    """Return a folder of the cache. If it is missing or damaged, `make` builds it.

    Other processes that need the folder wait for the first. `private`: no other user can write to it, whatever the
    umask. `resumable`: `make` may be given the folder of an interrupted call, and continues it. `check` raises
    DamagedFolder or UsageError for a folder that cannot be used though its digests are right.
    """
    check_home(folder, "the cache")
    with explain_errors(folder, REMEDY):
        if not _is_whole(folder, form, private, check):
            with lock(_lock_of(folder), waiting=str(folder)) as is_locked:
                if not _is_whole(folder, form, private, check, silent=True):
                    if is_locked:
                        _sweep(folder)
                    # without locks another process might build the same folder at the same time
                    owner = RESUMABLE if resumable and is_locked else str(os.getpid())
                    _make(folder, form, make, private, owner)
    return folder


def _is_whole(
    folder: Path, form: Format, private: bool, check: Callable[[Path], object] | None, silent: bool = False
) -> bool:
    """Return whether a folder exists undamaged and, if `private`, only this user can write to it."""
    if not folder.is_dir():
        return False
    try:
        folder_manifest.verify(folder, form, check=_has_digest)
        if private and not all(is_private(path) for path in (folder, *folder.iterdir())):
            raise DamagedFolder(f"{folder}: others can write to it.")
        if check:
            check(folder)
        return True
    except (DamagedFolder, UsageError) as damaged:
        if not silent:
            print(f"{damaged} Rebuilding it.", file=sys.stderr)
        return False


def _make(folder: Path, form: Format, make: Callable[[Path], None], private: bool, owner: str) -> None:
    """Build a temporary folder beside `folder`, then rename it. An existing folder is damaged, and is removed."""
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
            if not folder.is_dir():  # without locks another process may have been faster
                raise
        files.fsync(folder.parent)
    finally:
        if not _is_resumable(staged):
            shutil.rmtree(staged, ignore_errors=True)


def _deny_others(*paths: Path) -> None:
    """Let only the owner write to files and folders."""
    for path in paths:
        path.chmod(stat.S_IMODE(path.stat().st_mode) & ~0o022)


def _remove_damaged(folder: Path) -> None:
    if folder.is_symlink() or folder.is_file():
        folder.unlink()
    elif folder.exists():
        # others may be reading it: their open files stay valid
        damaged = _unfinished(folder, DAMAGED)
        shutil.rmtree(damaged, ignore_errors=True)
        folder.rename(damaged)
        shutil.rmtree(damaged, ignore_errors=True)


def _unfinished(folder: Path, owner: str) -> Path:
    return folder.with_name(f"{UNFINISHED}{folder.name}-{owner}")


def _is_resumable(staged: Path) -> bool:
    """Return whether a folder holds interrupted work that can be resumed and is recent."""
    try:
        return staged.name.endswith(RESUMABLE) and time.time() - (staged / PROGRESS).stat().st_mtime < RESUMABLE_FOR
    except OSError:
        return False


def _sweep(folder: Path) -> None:
    """Remove unfinished folders of processes that died. A running process holds the lock of its folder."""
    for path in folder.parent.glob(f"{UNFINISHED}*"):
        left = LEFT.fullmatch(path.name)
        if left is None or _is_resumable(path):
            continue
        if (name := left["name"]) == folder.name:  # this process holds its lock
            shutil.rmtree(path, ignore_errors=True)
            continue
        with suppress(Held, OSError), lock(_lock_of(folder.with_name(name))):
            shutil.rmtree(path, ignore_errors=True)


def _lock_of(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.lock")


def _has_digest(path: Path, digest: str) -> bool:
    """Return whether a file has this sha256. A large file is hashed once on this machine, and again when it changes."""
    status = path.stat()
    if status.st_size < REMEMBERED:
        return files.sha256(path) == digest
    identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    marker = home_cache() / "digests" / key_of(socket.gethostname(), str(path.resolve()), *identity, digest)
    if marker.exists():
        return True
    if files.sha256(path) != digest:
        return False
    with suppress(OSError):  # without a writable home it is hashed each time
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()
    return True
