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


def write_whole(path: Path, text: str) -> None:
    """Write a file so that, whenever the machine stops, it is as it was or as it shall be."""
    staged = path.with_name(f".{path.name}.partial")
    staged.write_text(text, encoding="utf-8")
    flush(staged)
    staged.replace(path)


def sha256(path: Path) -> str:
    """The sha256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def signed(content: dict[str, Any]) -> str:
    """Plain values as a JSON text, whose last entry is the sha256 of what is there without it."""
    digest = hashlib.sha256(json.dumps(content, indent=2).encode()).hexdigest()
    return json.dumps({**content, "sha256": digest}, indent=2) + "\n"


def read_signed(text: bytes) -> dict[str, Any]:
    """What `signed` made a text of; a ValueError if a single bit of the text is another."""
    try:
        content = dict(parse_json(text))
        del content["sha256"]
        if signed(content).encode() == text:
            return content
    except (TypeError, KeyError, RecursionError):
        pass
    raise ValueError("damaged")


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text; a ValueError for all that is none, and for what is nested too deeply to be read."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
