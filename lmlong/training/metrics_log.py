"""metrics.jsonl: metrics as one JSON object on each line, truncated when a run resumes from a checkpoint."""

import json
import math
import sys
from pathlib import Path
from types import NoneType
from typing import Any

from lmlong.io.files import fsync, parse_json
from lmlong.io.system_errors import explain_errors

METRICS_FILE = "metrics.jsonl"
REMEDY = "Fix that, and resume with --resume auto."

LARGEST, LARGEST_STEP = 1e300, 1 << 40
"""Upper limits of the numbers and steps in a log."""

NUMBERS = ("loss", "bits_per_byte", "perplexity", "learning_rate", "gradient_norm", "tokens_per_second")
"""Keys of numbers that commands read; None if a number was not finite."""

VALIDATIONS = ("final_validation", "validation")
"""Keys of validation losses: on more of the text after the last step, and on the even sample."""


class MetricsLog:
    """The metrics log of a run, written line by line; only one of several processes writes it."""

    def __init__(self, path: Path, silent: bool = False):
        self.path, self.silent = path, silent

    def write(self, **line: Any) -> None:
        """Add a line; numbers that are not finite, which JSON cannot express, become null."""
        if self.silent:
            return
        with explain_errors(self.path, REMEDY), self.path.open("a", encoding="utf-8", newline="\n") as file:
            file.write(json.dumps(_finite(line), allow_nan=False) + "\n")

    def flush(self) -> None:
        """Flush to disk: a power cut after a checkpoint must not lose lines before it."""
        with explain_errors(self.path, REMEDY):
            if self.path.exists():
                fsync(self.path)

    def cut_back(self, step: int) -> None:
        """Drop the lines after a step, and unfinished or invalid lines."""
        if self.silent or not self.path.exists():
            return
        whole = [line for line in self.path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
        entries = [_entry(line) for line in whole]
        if strange := entries.count(None):
            print(f"{self.path}: {strange} invalid lines were dropped", file=sys.stderr)
        kept = [line for line, entry in zip(whole, entries, strict=True) if entry and entry["step"] <= step]
        new = self.path.with_name(self.path.name + ".partial")
        with explain_errors(self.path, REMEDY):
            new.write_bytes(b"".join(kept))
            new.replace(self.path)


def read_entries(path: Path) -> list[dict[str, Any]]:
    """Return the valid entries of a metrics log, or an empty list without a log."""
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    return [entry for line in lines if line.endswith(b"\n") and (entry := _entry(line))]


def last_validation(entries: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the newest validation: the final one, else that of the even sample."""
    validated = [entry for entry in entries if any(isinstance(entry.get(name), dict) for name in VALIDATIONS)]
    if not validated:
        return None
    return {"step": validated[-1]["step"], **next(validated[-1][name] for name in VALIDATIONS if name in validated[-1])}


def _finite(value: Any) -> Any:
    """Return plain values with None in place of numbers that are not finite."""
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _entry(line: bytes) -> dict[str, Any] | None:
    """Return the entry of a line; None if it is invalid."""
    try:
        entry = parse_json(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and _is_sound(entry) else None


def _is_sound(entry: dict[str, Any]) -> bool:
    """Return whether an entry has the types that a run writes, and plausible numbers."""
    step = entry.get("step")
    validations = [entry[name] for name in VALIDATIONS if name in entry]
    return (
        type(step) is int
        and 0 <= step < LARGEST_STEP
        and all(_is_number(value) for value in entry.values() if isinstance(value, int | float))
        and all(type(entry.get(name)) in (int, float, NoneType) for name in NUMBERS)
        and all(isinstance(each, dict) and each and all(map(_is_number, each.values())) for each in validations)
    )


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < LARGEST
