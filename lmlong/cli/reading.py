"""The text of a file or of standard input, with progress on standard error: a bar on a terminal, otherwise a line every
few seconds."""

import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import TracebackType

from tqdm import tqdm

from lmlong.data.formats.table import is_utf8, text_file
from lmlong.errors import UsageError
from lmlong.inference.prompts import pieces_of

LARGE = 1 << 20
"""Size of a text in bytes from which a terminal shows progress."""

SECONDS = 10.0
"""Seconds between lines without a terminal."""


class ReadingProgress:
    """The number of bytes read so far, of `size` if that is known."""

    def __init__(self, name: str, size: int | None):
        self.name, self.size, self.read = name, size, 0
        self._printed = time.monotonic()
        quiet = True if size is not None and size < LARGE else None
        self._bar = tqdm(total=size, unit="B", unit_scale=True, desc="reading", leave=False, disable=quiet)

    def __enter__(self) -> "ReadingProgress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()

    def update(self, count: int) -> None:
        """Add bytes that were read."""
        self.read += count
        self._bar.update(count)
        if self._bar.disable and time.monotonic() - self._printed >= SECONDS:
            self._printed = time.monotonic()
            of = f" of {self.size / 1e6:,.1f}" if self.size else ""
            print(f"{self.name}: read {self.read / 1e6:,.1f}{of} MB", file=sys.stderr, flush=True)


def pieces(file: Path | None) -> Iterator[str]:
    """Iterate over the text of a file, in any format that training reads, or of standard input."""
    if file and file.is_file():
        document = text_file(file)
        size = file.stat().st_size if is_utf8(file, document) else None
        yield from _with_progress(document.pieces(), document.name, size)
        return
    name = str(file or "standard input")
    try:
        with file.open("rb") if file else nullcontext(sys.stdin.buffer) as source:
            yield from _with_progress(pieces_of(source, name), name, None)
    except OSError as error:
        raise UsageError(f"{name}: cannot be read ({error.strerror}). Name a file with the text to continue.") from None


def _with_progress(text: Iterator[str], name: str, size: int | None) -> Iterator[str]:
    with ReadingProgress(name, size) as reading:
        for piece in text:
            yield piece
            reading.update(len(piece.encode()))
