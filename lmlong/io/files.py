"""Flush, hash and atomically write files, and parse JSON."""

import errno
import hashlib
import json
import os
from pathlib import Path
from typing import Any


def fsync(path: Path) -> None:
    """Flush a file or a folder to disk, so that a power cut cannot leave a rename without its data."""
    if os.name == "nt" and path.is_dir():  # Windows cannot open folders, and flushes only files open for writing
        return
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def staged(path: Path) -> Path:
    """Return the name that a file or folder has until it is complete. It is lmlong's own, so that nothing of the user's
    is replaced or removed in its place."""
    return path.with_name(f".{path.name}.lmlong-partial")


def atomic_write(path: Path, text: str) -> None:
    """Write a file so that it has its old or its new content if the machine stops."""
    unfinished = staged(path)
    unfinished.write_bytes(text.encode())  # in text mode Windows would change line ends
    fsync(unfinished)
    unfinished.replace(path)


def read_ordinary(path: Path) -> bytes:
    """Return the content of a file. Raise OSError for a pipe or a device, which may never end."""
    check_ordinary(path)
    return path.read_bytes()


def check_ordinary(path: Path) -> None:
    """Raise OSError for a pipe or a device, on which a reader may wait indefinitely."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.EINVAL, "a pipe or a device, not a file", str(path))


def sha256(path: Path) -> str:
    """Return the sha256 of a file, read in chunks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def with_checksum(content: dict[str, Any]) -> str:
    """Return plain values as a JSON text whose last entry is the sha256 of the rest."""
    digest = hashlib.sha256(json.dumps(content, indent=2).encode()).hexdigest()
    return json.dumps({**content, "sha256": digest}, indent=2) + "\n"


def read_checksummed(text: bytes) -> dict[str, Any]:
    """Return the values that `with_checksum` wrote. Raise ValueError if any bit of the text has changed."""
    try:
        content = dict(parse_json(text))
        del content["sha256"]
        if with_checksum(content).encode() == text:
            return content
    except (TypeError, KeyError, RecursionError):
        pass
    raise ValueError("damaged")


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raise ValueError if it is not JSON or is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
