"""metrics.jsonl: what happened at each step, a line of JSON each, cut back when a run goes on from a checkpoint."""

import json
import math
import sys
from pathlib import Path
from typing import Any

from lmlong.errors import LmlongError
from lmlong.io.files import flush, parse_json


class Journal:
    """The lines of a run, written as they come; by one process only, where several train together."""

    def __init__(self, path: Path, silent: bool = False):
        self.path, self.silent = path, silent

    def write(self, **line: Any) -> None:
        """Add a line; numbers that are not finite, which JSON has no word for, become null."""
        if self.silent:
            return
        finite = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in line.items()
        }
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(finite) + "\n")
        except OSError as error:
            raise LmlongError(
                f"{self.path}: cannot be written ({error.strerror}). Mend that, and go on with --resume auto."
            ) from error

    def flush(self) -> None:
        """Have the disk hold what was written: no line before a checkpoint may be lost to a power cut after it."""
        if self.path.exists():
            flush(self.path)

    def cut_back(self, step: int) -> None:
        """Drop what lies after a step, and lines that are none: an unfinished one, or what else got into the file."""
        if self.silent or not self.path.exists():
            return
        whole = [line for line in self.path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
        entries = [_entry(line) for line in whole]
        if strange := entries.count(None):
            print(f"{self.path}: {strange} lines that no run wrote were left out", file=sys.stderr)
        kept = [line for line, entry in zip(whole, entries, strict=True) if entry and entry["step"] <= step]
        new = self.path.with_name(self.path.name + ".partial")
        new.write_bytes(b"".join(kept))
        new.replace(self.path)


def read_entries(path: Path) -> list[dict[str, Any]]:
    """What a journal tells, without lines that are unfinished or none; empty where there is no journal."""
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    return [entry for line in lines if line.endswith(b"\n") and (entry := _entry(line))]


def _entry(line: bytes) -> dict[str, Any] | None:
    """What a line tells of a step; None for anything else."""
    try:
        entry = parse_json(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and type(entry.get("step")) is int else None
