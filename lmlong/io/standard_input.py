"""Standard input as a file that stays: text is read more than once, by more than one process, and by later runs."""

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
"""Seconds without a byte after which a copy is one that was never finished."""


def path_of(path: str) -> str:
    """Return a path itself, or that of a file that holds standard input, for which `-` stands, and `-.jsonl` where it
    is to be read as a file of that kind.

    The file is in a folder of the cache, named by its content. It is standard input from then on, so that this process
    and those it starts find the text again, which could be read only once.
    """
    if path != "-" and (not path.startswith("-.") or os.sep in path):
        return path
    folder, suffix = cache_folder() / "input", path[1:] or ".txt"
    check_home(folder, "standard input")
    with explain_errors(folder, REMEDY):
        folder.mkdir(parents=True, exist_ok=True)
        return str(_kept_before(folder, suffix) or _keep(folder, suffix))


def _kept_before(folder: Path, suffix: str) -> Path | None:
    """Return the file of the folder that standard input is."""
    status = os.fstat(DESCRIPTOR)
    kept = (path for path in folder.glob(f"*{suffix}") if not path.name.startswith(UNFINISHED))
    return next((path for path in kept if os.path.samestat(path.stat(), status)), None)


def _keep(folder: Path, suffix: str) -> Path:
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
            raise UsageError("-: nothing came by standard input. Pipe text into it, or name files in text.sources.")
        kept = folder / f"{digest.hexdigest()[:32]}{suffix}"
        staged.replace(kept)
    finally:
        staged.unlink(missing_ok=True)
    with kept.open("rb") as file:
        os.dup2(file.fileno(), DESCRIPTOR)
    print(f"standard input: {size:,} bytes, kept as {kept}", file=sys.stderr, flush=True)
    return kept


def _sweep(folder: Path) -> None:
    """Remove the copies that other processes could not finish."""
    for path in folder.glob(f"{UNFINISHED}*"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > CUT_OFF:
                path.unlink()
