"""The text of a file or of standard input, with progress on standard error."""

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

from lmlong.data.formats.table import is_utf8, text_file
from lmlong.errors import UsageError
from lmlong.inference.prompts import pieces_of
from lmlong.report.progress import Progress


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
    with Progress(f"reading {name}", size) as progress:
        for piece in text:
            yield piece
            progress.update(len(piece.encode()))
