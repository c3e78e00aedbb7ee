"""Show the progress of reading a text: a bar on a terminal, otherwise a line at intervals."""

import sys
import time
from contextlib import suppress

from tqdm import tqdm

from lmlong.data.sources import Input

LINE_INTERVAL = 10.0
"""Minimum seconds between two lines."""


class Progress:
    """Bytes read, their share of the total, speed and remaining time, on stderr. Use it as `with Progress(...)`."""

    def __init__(self, name: str, total: int | None):
        self.name, self.total = name, total
        self.read = 0
        self._begun = self._last_line = time.monotonic()
        self._initial = 0  # bytes of earlier work
        self.bar = tqdm(desc=name, total=total, unit="B", unit_scale=True, disable=None, dynamic_ncols=True)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(OSError):
            self.bar.close()

    def skip(self, size: int) -> None:
        """Count bytes of earlier work, which do not affect the speed."""
        self.read += size
        self._initial += size
        self._begun = time.monotonic()
        if not self.bar.disable:
            self.bar.initial += size
            self.bar.n += size
            self.bar.start_t = time.time()

    def update(self, size: int) -> None:
        """Count bytes as read."""
        self.read += size
        with suppress(OSError):  # a closed pipe must not end the work
            self.bar.update(size)
            if self.bar.disable and time.monotonic() - self._last_line >= LINE_INTERVAL:
                self._last_line = time.monotonic()
                print(self.line(), file=sys.stderr, flush=True)

    def line(self) -> str:
        """Return the progress as a line of text."""
        speed = (self.read - self._initial) / max(time.monotonic() - self._begun, 1e-3)
        if not self.total or self.read > self.total:
            return f"{self.name}: {self.read / 1e6:,.1f} MB, {speed / 1e6:,.1f} MB/s"
        left = tqdm.format_interval((self.total - self.read) / max(speed, 1.0))
        done = f"{self.read / self.total:.0%} of {self.total / 1e6:,.1f} MB"
        return f"{self.name}: {done}, {speed / 1e6:,.1f} MB/s, {left} left"


def size_of(inputs: list[Input]) -> int | None:
    """Return the bytes of text of some sources. None if they are not known before reading."""
    sizes = [entry.source.bytes for entry in inputs]
    return None if None in sizes else sum(size or 0 for size in sizes)
