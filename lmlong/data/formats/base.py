"""What a file format is, and the simplest: plain text."""

from abc import ABC, abstractmethod
from collections.abc import Container, Iterator
from functools import partial
from pathlib import Path, PurePath
from typing import Literal, NamedTuple

from lmlong.data.document import Document, Errors, Skipped, file_fields
from lmlong.data.encoding import UTF8, find_encoding, marked
from lmlong.data.formats.compression import COMPRESSED, read_bytes
from lmlong.errors import UsageError

PLAIN_SUFFIXES = (".txt", ".md", ".py")

LARGE = 1 << 22
"""Size of a plain file in bytes from which `quick_check` does not decode it."""

SoftMasks = Literal["keep", "upper"]


class ReadOptions(NamedTuple):
    """The options of a source that affect how its files are read."""

    column: str = "text"
    errors: Errors = "strict"
    encoding: str = "auto"
    soft_masks: SoftMasks = "keep"


def suffix_of(path: PurePath) -> str:
    """Return the suffix that determines the format, in lower case and without that of a compression."""
    suffix = path.suffix.lower()
    return PurePath(path.stem).suffix.lower() if suffix in COMPRESSED else suffix


def file_document(path: Path, errors: Errors, encoding: str = UTF8) -> Document:
    """Return a whole file as one document."""
    return Document(str(path), lambda: read_bytes(path), errors, encoding, file_fields(path))


class FileFormat(ABC):
    """How files of one format are read. The defaults are those of a format whose files hold several documents."""

    is_text = False
    """Whether the bytes of a file, once decompressed, are text."""
    compressions: Container[str] = COMPRESSED
    """Suffixes of the compressions that are decompressed."""
    compressed: "FileFormat | None" = None
    """The format of files that are compressed otherwise; None if it is unknown."""

    @property
    def refusal(self) -> str | None:
        """Why a file is not read even if it is named, or None."""
        return None

    def skip_reason(self, path: Path, column: str) -> str | None:
        """Return why a folder skips a file that is not named, or None if it is read."""
        return self.refusal

    def check(self, path: Path, options: ReadOptions) -> str:
        """Return the encoding to read a file in; raise a UsageError if the file cannot be read."""
        for _ in self.documents(path, options):
            pass
        return options.encoding

    def quick_check(self, path: Path, options: ReadOptions) -> bool:
        """Return whether a file appears to be readable; raise a UsageError that explains a certain mistake."""
        return True

    @abstractmethod
    def documents(self, path: Path, options: ReadOptions) -> Iterator[Document | Skipped]:
        """Iterate over the documents of a file, in the encoding that `check` returned."""

    def fingerprint(self, path: Path, options: ReadOptions) -> str:
        """Return what the text of a file depends on in addition to its bytes."""
        return f"{options.column} {suffix_of(path)} {path.suffix}"


class RefusedFormat(FileFormat):
    """A format that is not supported."""

    def __init__(self, refusal: str):
        self._refusal = refusal

    @property
    def refusal(self) -> str:
        return self._refusal

    def documents(self, path: Path, options: ReadOptions) -> Iterator[Document | Skipped]:
        raise UsageError(f"{path}: {self._refusal}.")


class PlainText(FileFormat):
    """A file that is one document."""

    is_text = True

    def __init__(self, skip_reason: str | None = None):
        self._skip_reason = skip_reason

    def skip_reason(self, path: Path, column: str) -> str | None:
        return self._skip_reason

    def check(self, path: Path, options: ReadOptions) -> str:
        if options.errors == "strict":
            return find_encoding(partial(read_bytes, path), str(path), options.encoding)
        return _declared_encoding(path, options) or UTF8

    def quick_check(self, path: Path, options: ReadOptions) -> bool:
        try:
            if options.errors == "strict" and path.stat().st_size < LARGE:
                self.check(path, options)
            return True
        except UsageError:
            return False

    def documents(self, path: Path, options: ReadOptions) -> Iterator[Document | Skipped]:
        yield file_document(path, options.errors, options.encoding)

    def fingerprint(self, path: Path, options: ReadOptions) -> str:
        declared = _declared_encoding(path, options)
        return super().fingerprint(path, options) + (f" as {declared} {options.encoding}" if declared else "")


def _declared_encoding(path: Path, options: ReadOptions) -> str | None:
    """Return the encoding of a plain file by the recipe or its byte order mark."""
    if options.encoding != "auto":
        return options.encoding
    try:
        return marked(next(read_bytes(path), b""))
    except UsageError:  # damaged, which `check` reports
        return None
