"""Documents of word processors, e-books, web pages and PDFs: their text, converted by another process in bounded time
and memory."""

import atexit
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from lmlong.io.limited_process import LimitedProcess, RequestFailed

KINDS = (".epub", ".docx", ".pdf", ".html", ".htm", ".xhtml")
"""The suffixes of what is converted."""

NEEDS = {".pdf": "pypdfium2"}
"""The package that a kind needs, of the extra `documents`."""

READER = 2
"""Counted up whenever the text of a document becomes another one, so that its tokens are made anew."""

SECONDS, SECONDS_PER_MB = 60.0, 2.0


class ConversionError(Exception):
    """A document that cannot be converted, with the reason."""


def why_not(kind: str) -> str | None:
    """Return why documents of a kind cannot be converted here; None where they can."""
    package = NEEDS.get(kind)
    if package and find_spec(package) is None:
        return "needs lmlong[documents]: run pip install 'lmlong[documents]'"
    return None


def reader_of(kind: str) -> str:
    """Return what the text of a document depends on beside its bytes."""
    try:
        return f"{READER} {version(NEEDS[kind])}" if kind in NEEDS else str(READER)
    except PackageNotFoundError:
        return str(READER)


class Converter:
    """Converts documents in another process, which is started when it is first needed."""

    def __init__(self) -> None:
        self._process = LimitedProcess("lmlong.data.converters.worker")

    def convert(self, path: Path, kind: str) -> bytes:
        """Return the text of a document in UTF-8."""
        seconds = SECONDS + SECONDS_PER_MB * path.stat().st_size / 1e6
        try:
            return self._process.ask({"kind": kind, "path": str(path.resolve())}, seconds)
        except RequestFailed as error:
            raise ConversionError(str(error)) from None

    def close(self) -> None:
        """End the process."""
        self._process.close()


CONVERTER = Converter()
atexit.register(CONVERTER.close)


def converted(path: Path, kind: str) -> bytes:
    """Return the text of a document; it is converted once where it is read several times in a row."""
    about = path.stat()
    return _converted(path, kind, about.st_mtime_ns, about.st_size)


@lru_cache(maxsize=1)
def _converted(path: Path, kind: str, changed: int, size: int) -> bytes:
    return CONVERTER.convert(path, kind)
