"""Word processor documents, e-books, web pages and PDFs, converted to text by a separate process with limited time and
memory."""

import atexit
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from lmlong.data.document import Document, ReadOptions, Skipped, file_fields
from lmlong.data.formats.compression import slices
from lmlong.io.limited_process import LimitedProcess, RequestFailed

READER = 2
"""Incremented when the converted text of a document changes, so that cached tokens are made again."""

SECONDS, SECONDS_PER_MB = 60.0, 2.0
"""Time limit for a document."""


def converted(path: Path, options: ReadOptions) -> Iterator[Document | Skipped]:
    """Yield a document as text, or why it has none."""
    try:
        if _text(path):
            yield Document(str(path), lambda: slices(_text(path)), fields=file_fields(path))
            return
        reason = "no text in it"
    except RequestFailed as error:
        reason = str(error)
    yield Skipped(str(path), f"cannot be converted to text ({reason})", path.stat().st_size)


def converter(path: Path, options: ReadOptions, package: str | None = None) -> str:
    """Return the version of what converts a document, which may be a package of the extra `documents`."""
    installed = ""
    if package:
        with suppress(PackageNotFoundError):
            installed = f" {version(package)}"
    return f" by {READER}{installed}"


PROCESS = LimitedProcess("lmlong.data.converters.worker")
atexit.register(PROCESS.close)


def _text(path: Path) -> bytes:
    """Return the text of a document, which is converted once if it is read several times in a row."""
    about = path.stat()
    return _convert(path, about.st_mtime_ns, about.st_size)


@lru_cache(maxsize=1)
def _convert(path: Path, changed: int, size: int) -> bytes:
    request = {"kind": path.suffix.lower(), "path": str(path.resolve())}
    return PROCESS.ask(request, SECONDS + SECONDS_PER_MB * size / 1e6)
