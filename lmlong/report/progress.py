"""The progress of long work on standard error: a bar on a terminal, otherwise a line at intervals."""

import math
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread
from typing import TypeVar

from tqdm import tqdm

FIRST = 2.0
"""Seconds of work after which it is shown."""

INTERVAL = 10.0
"""Minimum seconds between two lines."""

SHARE = 0.01
"""Share of the work after which its speed says how long the rest takes."""

Item = TypeVar("Item")


class Progress:
    """How much work is done, its share of the total, speed and time left. Use it as `with Progress(...)`.

    The unit is a plural noun, or B for bytes. Without a `total`, the time left is unknown. `show=False` prints nothing.
    """

    def __init__(self, name: str, total: int | None, unit: str = "B", show: bool = True):
        self.name, self.total, self.unit = name, total, unit
        self.done = 0
        self._initial = 0  # earlier work
        self._begun = time.monotonic()
        self._next_line = self._begun + FIRST if show else math.inf
        self.bar = tqdm(
            desc=name,
            total=total,
            unit="B" if unit == "B" else f" {unit}",
            unit_scale=True,
            leave=False,
            delay=FIRST,
            disable=None if show else True,
            dynamic_ncols=True,
        )

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(OSError):
            self.bar.close()

    def begin(self, part: str) -> None:
        """Name the part of the work that begins."""
        self.name = part
        with suppress(OSError):
            self.bar.set_description(part, refresh=False)

    def skip(self, size: int) -> None:
        """Count earlier work, which does not affect the speed."""
        self.done += size
        self._initial += size
        if self.done == self._initial:
            self._begun = time.monotonic()
        if not self.bar.disable:
            self.bar.initial += size
            self.bar.n += size
            self.bar.start_t = time.time() - (time.monotonic() - self._begun)

    def update(self, size: int = 1) -> None:
        """Count work as done."""
        self.done += size
        with suppress(OSError):  # a closed pipe must not end the work
            if not self.bar.disable:
                self.bar.update(size)
            elif (now := time.monotonic()) >= self._next_line:
                self._next_line = now + INTERVAL
                print(self.line(), file=sys.stderr, flush=True)

    def line(self) -> str:
        """Return the progress as a line of text."""
        speed = (self.done - self._initial) / max(time.monotonic() - self._begun, 1e-3)
        rate = f"{1 / speed:,.0f} s each" if 0 < speed < 1 and self.unit != "B" else f"{self._count(speed)}/s"
        if not self.total or self.done > self.total:
            return f"{self.name}: {self._count(self.done)}, {rate}"
        is_known = self.done - self._initial >= SHARE * self.total  # the first work is slow, such as that of imports
        left = tqdm.format_interval((self.total - self.done) / speed) if is_known and speed else "?"
        return f"{self.name}: {self.done / self.total:.0%} of {self._count(self.total)}, {rate}, {left} left"

    def _count(self, size: float) -> str:
        if self.unit != "B":
            return f"{size:,.0f} {self.unit}"
        return f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size / 1e3:,.1f} kB"


def each(items: Iterable[Item], name: str, total: int | None, unit: str, show: bool = True) -> Iterator[Item]:
    """Iterate over the items, and show how many are done."""
    with Progress(name, total, unit, show) as progress:
        for item in items:
            yield item
            progress.update()


@contextmanager
def waiting(name: str) -> Iterator[None]:
    """Show at intervals how long work takes that cannot count its steps."""
    begun, ended = time.monotonic(), Event()

    def show() -> None:
        seconds = FIRST
        while not ended.wait(seconds):
            with suppress(OSError):
                tqdm.write(f"{name}: {tqdm.format_interval(time.monotonic() - begun)} so far", file=sys.stderr)
            seconds = INTERVAL

    thread = Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
