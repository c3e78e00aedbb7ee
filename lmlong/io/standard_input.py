"""Copy standard input to a file: text is read repeatedly, by several processes and by later runs."""

import os
import sys
import time
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from lmlong.errors import UsageError
from lmlong.io.cache import REMEDY, UNFINISHED, cache_folder, check_home
from lmlong.io.incoming_bytes import CHUNK
from lmlong.io.system_errors import explain_errors

DESCRIPTOR = 0

CUT_OFF = 24 * 3600
"""Seconds without a write after which an unfinished copy is abandoned."""


def path_of(path: str) -> str:
    """Return the path. For `-`, or `-.SUFFIX` to read it as that format, return a file with a copy of standard input.

    The file is in a folder of the cache, named by its content. It replaces standard input, so that this process and its
    children can read the text again.
    """
    if path != "-" and (not path.startswith("-.") or os.sep in path):
        return path
    folder, suffix = cache_folder() / "input", path[1:] or ".txt"
    check_home(folder, "standard input")
    with explain_errors(folder, REMEDY):
        folder.mkdir(parents=True, exist_ok=True)
        return str(_existing_copy(folder, suffix) or _copy(folder, suffix))


def _existing_copy(folder: Path, suffix: str) -> Path | None:
    """Return the copy in the folder that is standard input already."""
    status = os.fstat(DESCRIPTOR)
    copies = (path for path in folder.glob(f"*{suffix}") if not path.name.startswith(UNFINISHED))
    return next((path for path in copies if os.path.samestat(path.stat(), status)), None)


def _copy(folder: Path, suffix: str) -> Path:
    if os.isatty(DESCRIPTOR):
        raise UsageError("-: standard input is a terminal. Pipe text into it, or name files in text.sources.")
    _sweep(folder)
    staged = folder / f"{UNFINISHED}{os.getpid()}"
    try:
        digest = sha256()
        with staged.open("wb") as file:
            while data := os.read(DESCRIPTOR, CHUNK):
                digest.update(data)
                file.write(data)
            size = file.tell()
        if not size:
            raise UsageError("-: standard input is empty. Pipe text into it, or name files in text.sources.")
        copy = folder / f"{digest.hexdigest()[:32]}{suffix}"
        staged.replace(copy)
    finally:
        staged.unlink(missing_ok=True)
    with copy.open("rb") as file:
        os.dup2(file.fileno(), DESCRIPTOR)
    print(f"standard input: {size:,} bytes, kept as {copy}", file=sys.stderr, flush=True)
    return copy


def _sweep(folder: Path) -> None:
    """Remove copies that other processes did not finish."""
    for path in folder.glob(f"{UNFINISHED}*"):
        with suppress(OSError):
            if path.name.removeprefix(UNFINISHED).isdecimal() and time.time() - path.stat().st_mtime > CUT_OFF:
                path.unlink()
