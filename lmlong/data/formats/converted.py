"""Word processor documents, e-books, web pages and PDFs, converted to text by a separate process with limited time and
memory."""

import atexit
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from lmlong.data.document import Document, Skipped, file_fields, slices
from lmlong.data.formats.base import FileFormat, ReadOptions, RefusedFormat
from lmlong.errors import install_command
from lmlong.io.limited_process import LimitedProcess, RequestFailed

READER = 2
"""Incremented when the converted text of a document changes, so that cached tokens are made again."""

SECONDS, SECONDS_PER_MB = 60.0, 2.0
"""Time limit for a document."""


class ConvertedDocument(FileFormat):
    """A document that is converted to text."""

    compressions = ()
    compressed = RefusedFormat("a compressed document: unpack it")

    def __init__(self, package: str | None = None):
        """`package` is the one of the extra `documents` that the conversion needs, if any."""
        self._package = package

    @property
    def refusal(self) -> str | None:
        if self._package and find_spec(self._package) is None:
            return f"{self._package} is not installed: run {install_command('documents')}"
        return None

    def check(self, path: Path, options: ReadOptions) -> str:
        return options.encoding  # a document that cannot be converted is skipped

    def documents(self, path: Path, options: ReadOptions) -> Iterator[Document | Skipped]:
        yield self.convert(path)

    def convert(self, path: Path) -> Document | Skipped:
        """Return a document as text, or why it has none."""
        try:
            if _text(path):
                return Document(str(path), lambda: slices(_text(path)), fields=file_fields(path))
            reason = "no text in it"
        except RequestFailed as error:
            reason = str(error)
        return Skipped(str(path), f"cannot be converted to text ({reason})", path.stat().st_size)

    def fingerprint(self, path: Path, options: ReadOptions) -> str:
        reader = str(READER)
        if self._package:
            with suppress(PackageNotFoundError):
                reader += f" {version(self._package)}"
        return f"{super().fingerprint(path, options)} by {reader}"


PROCESS = LimitedProcess("lmlong.data.converters.worker")
atexit.register(PROCESS.close)


def _text(path: Path) -> bytes:
    """Return the text of a document, which is converted once if it is read several times in a row."""
    about = path.stat()
    return _converted(path, about.st_mtime_ns, about.st_size)


@lru_cache(maxsize=1)
def _converted(path: Path, changed: int, size: int) -> bytes:
    request = {"kind": path.suffix.lower(), "path": str(path.resolve())}
    return PROCESS.ask(request, SECONDS + SECONDS_PER_MB * size / 1e6)
