"""Results of the steps of long work, kept until all of it is done, so that work that was killed continues.

A file of the cache has one line for each step: a checksum, and the step's name and result as JSON. The checksum
includes all that the results depend on, so that lines of other work and damaged ones are not read.
"""

import json
import time
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from lmlong.io.cache import KEY, RESUMABLE_FOR, cache_folder, key_of

CHECKSUM = 16
"""Characters of the checksum of a line."""


class KeptSteps:
    """The steps of one piece of work. Without `content`, nothing is kept."""

    def __init__(self, folder: str = "", *content: Any):
        self._key = key_of(*content)
        self._file = cache_folder() / folder / f"{self._key}.steps" if content else None
        self._results: dict[str, Any] = {}
        if self._file:
            with suppress(OSError):
                _sweep(self._file.parent)
                self._read(self._file)

    @property
    def is_kept(self) -> bool:
        """Whether results are kept."""
        return self._file is not None

    @property
    def resumed(self) -> bool:
        """Whether there are kept results that were not used yet."""
        return bool(self._results)

    def __contains__(self, name: str) -> bool:
        return name in self._results

    def get(self, name: str, compute: Callable[[], Any]) -> Any:
        """Return the kept result of a step, or that of `compute`, which must be JSON values."""
        if name in self._results:
            return self._results.pop(name)
        result = compute()
        if self._file:
            self._append(self._file, json.dumps([name, result]))
        return result

    def finish(self) -> None:
        """Remove the file, since all work is done."""
        if self._file:
            with suppress(OSError):
                self._file.unlink(missing_ok=True)

    def _read(self, file: Path) -> None:
        """Read the lines up to the first that is damaged, and cut the file there."""
        data = file.read_bytes()
        whole = 0
        for line in data.splitlines(keepends=True):
            checksum, body = line[:CHECKSUM], line[CHECKSUM + 1 : -1].decode(errors="replace")
            if not line.endswith(b"\n") or checksum != self._checksum(body).encode():
                break
            name, result = json.loads(body)
            self._results[name] = result
            whole += len(line)
        if whole < len(data):
            with file.open("r+b") as opened:
                opened.truncate(whole)

    def _append(self, file: Path, body: str) -> None:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("ab") as opened:
                opened.write(f"{self._checksum(body)} {body}\n".encode())
        except OSError:
            self._file = None  # a full or read-only cache must not end the work

    def _checksum(self, body: str) -> str:
        return sha256(f"{self._key} {body}".encode()).hexdigest()[:CHECKSUM]


def _sweep(folder: Path) -> None:
    """Remove the files of work that nobody has continued for long."""
    for path in folder.glob("*.steps"):
        if KEY.fullmatch(path.stem) and time.time() - path.stat().st_mtime > RESUMABLE_FOR:
            path.unlink(missing_ok=True)
