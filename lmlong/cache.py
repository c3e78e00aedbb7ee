"""Folders that are complete or absent, whoever is killed and however many processes write the same one."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any


def cache_folder() -> Path:
    """Where results that can be made again are kept: $LMLONG_CACHE, or ~/.cache/lmlong."""
    return Path(os.environ.get("LMLONG_CACHE") or "~/.cache/lmlong").expanduser()


def key_of(*content: Any) -> str:
    """A short hash of whatever a cached result depends on, in plain values."""
    return sha256(json.dumps(content).encode()).hexdigest()[:32]


def build(folder: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a folder beside its place, then rename it; if another process was faster, its folder stays."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f"unfinished-{folder.name[:8]}-", dir=folder.parent))
    try:
        write(temporary)
        for path in (*temporary.iterdir(), temporary):
            _flush(path)
        try:
            temporary.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
        _flush(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _flush(path: Path) -> None:
    """Have the operating system put a file or folder on the disk, so that a power cut cannot undo the rename alone."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
