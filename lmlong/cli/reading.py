"""The text of a file or of standard input, with progress on standard error: a bar on a terminal, otherwise a line every
few seconds."""

import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

from tqdm import tqdm

from lmlong.data.formats.table import is_utf8, text_file
from lmlong.errors import UsageError
from lmlong.inference.prompts import pieces_of

LARGE = 1 << 20
"""Size of a text in bytes from which a terminal shows progress."""

SECONDS = 10.0
"""Seconds between lines without a terminal."""


def pieces(file: Path | None) -> Iterator[str]:
    """Iterate over the text of a file, in any format that training reads, or of standard input."""
    if file and file.is_file():
        document = text_file(file)
        size = file.stat().st_size if is_utf8(file, document) else None
        yield from with_progress(document.pieces(), document.name, size)
        return
    name = str(file or "standard input")
    try:
        with file.open("rb") if file else nullcontext(sys.stdin.buffer) as source:
            yield from with_progress(pieces_of(source, name), name, None)
    except OSError as error:
        raise UsageError(f"{name}: cannot be read ({error.strerror}). Name a file with the text to continue.") from None


def with_progress(text: Iterator[str], name: str, size: int | None) -> Iterator[str]:
    """Iterate over a text, and show how much of its `size` in bytes was read, if that is known."""
    read, printed = 0, time.monotonic()
    quiet = True if size is not None and size < LARGE else None
    with tqdm(total=size, unit="B", unit_scale=True, desc="reading", leave=False, disable=quiet) as bar:
        for piece in text:
            yield piece
            count = len(piece.encode())
            read += count
            bar.update(count)
            if bar.disable and time.monotonic() - printed >= SECONDS:
                printed = time.monotonic()
                of = f" of {size / 1e6:,.1f}" if size else ""
                print(f"{name}: read {read / 1e6:,.1f}{of} MB", file=sys.stderr, flush=True)
