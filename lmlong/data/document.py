"""Documents: texts that are read in chunks of bounded size, without translating newlines."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path, PurePath
from typing import Any, Literal, NamedTuple

from lmlong.data.encoding import UTF8, decode
from lmlong.data.formats.compression import read_bytes, slices

Errors = Literal["strict", "replace"]
SoftMasks = Literal["keep", "upper"]


class ReadOptions(NamedTuple):
    """The options of a source that affect how its files are read."""

    column: str = "text"
    errors: Errors = "strict"
    encoding: str = "auto"
    soft_masks: SoftMasks = "keep"


class Measure(NamedTuple):
    """The hash and sizes of a document, from one pass over it. `digest` depends only on the text."""

    digest: bytes
    bytes: int  # of the text in UTF-8, including replacements
    read_bytes: int  # of the document as stored
    replaced_bytes: int  # bytes that could not be decoded
    put_in_bytes: int  # bytes of U+FFFD in their place


class Skipped(NamedTuple):
    """A document that is skipped, with the reason."""

    name: str
    reason: str
    bytes: int = 0


@dataclass(frozen=True)
class Document:
    """A text that can be read any number of times, in pieces."""

    name: str
    chunks: Callable[[], Iterator[bytes]]
    errors: Errors = "strict"
    encoding: str = UTF8
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Metadata: the names of the file and its folder, or the other fields of the record."""

    @classmethod
    def of_file(cls, path: Path, errors: Errors = "strict", encoding: str = UTF8) -> "Document":
        """Return a whole file as one document."""
        return cls(str(path), lambda: read_bytes(path), errors, encoding, file_fields(path))

    @classmethod
    def of_text(cls, name: str, text: str, errors: Errors, fields: Mapping[str, Any] | None = None) -> "Document":
        """Return a text in memory as a document. A lone surrogate counts as a decoding error."""
        data = text.encode("utf-8", "surrogatepass")
        return cls(name, lambda: slices(data), errors, fields=fields or {})

    def pieces(self) -> Iterator[str]:
        """Yield the text in non-empty strings of bounded size."""
        return (piece.text for piece in decode(self.chunks(), self.name, self.errors, self.encoding))

    def measure(self) -> Measure:
        """Read the document once, and return its hash and sizes."""
        digest, size, read, invalid, replacements = sha256(), 0, 0, 0, 0

        def counted() -> Iterator[bytes]:
            nonlocal read
            for chunk in self.chunks():
                read += len(chunk)
                yield chunk

        for piece in decode(counted(), self.name, self.errors, self.encoding):
            data = piece.text.encode()
            digest.update(data)
            size += len(data)
            invalid += piece.invalid_bytes
            replacements += piece.replacements
        return Measure(digest.digest(), size, read, invalid, replacements * len("\ufffd".encode()))


def file_fields(path: PurePath) -> dict[str, str]:
    """Return the fields of a document that is a whole file."""
    return {"file": path.name, "folder": path.parent.name}
