"""The progress of reading a long text: a bar on a terminal, elsewhere a line now and then, on standard error."""

import sys
import time
from types import TracebackType

from tqdm import tqdm

LARGE = 1 << 20
"""Size of a text in bytes from which its reading is told on a terminal."""

SECONDS = 10.0
"""Time between lines where there is no terminal."""


class Reading:
    """The bytes of a text that were read so far, of `size`, or of unknown many."""

    def __init__(self, name: str, size: int | None):
        self.name, self.size, self.read = name, size, 0
        self._told = time.monotonic()
        quiet = True if size is not None and size < LARGE else None
        self._bar = tqdm(total=size, unit="B", unit_scale=True, desc="reading", leave=False, disable=quiet)

    def __enter__(self) -> "Reading":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()

    def update(self, count: int) -> None:
        """Add bytes that were read."""
        self.read += count
        self._bar.update(count)
        if self._bar.disable and time.monotonic() - self._told >= SECONDS:
            self._told = time.monotonic()
            of = f" of {self.size / 1e6:,.1f}" if self.size else ""
            print(f"{self.name}: read {self.read / 1e6:,.1f}{of} MB", file=sys.stderr, flush=True)
