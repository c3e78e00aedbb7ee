"""Bytes on disk: flushed, hashed, and read as JSON whatever they are."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any


def flush(path: Path) -> None:
    """Have the disk hold what was written to a file or a folder, so that no power cut can undo a rename alone."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    """The sha256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text; a ValueError for all that is none, and for what is nested too deeply to be read."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
