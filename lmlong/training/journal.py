"""metrics.jsonl: what happened at each step, a line of JSON each, cut back when a run goes on from a checkpoint."""

import json
import math
from pathlib import Path
from typing import Any

from lmlong.checkpoint.write import flush


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
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(finite) + "\n")

    def flush(self) -> None:
        """Have the disk hold what was written: no line before a checkpoint may be lost to a power cut after it."""
        if self.path.exists():
            flush(self.path)

    def cut_back(self, step: int) -> None:
        """Drop what lies after a step, and a line that was never finished."""
        if self.silent or not self.path.exists():
            return
        kept = [line for line in self._whole_lines() if json.loads(line)["step"] <= step]
        new = self.path.with_name(self.path.name + ".partial")
        new.write_text("".join(kept), encoding="utf-8")
        new.replace(self.path)

    def _whole_lines(self) -> list[str]:
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
        return [line for line in lines if line.endswith("\n")]
