"""Bytes on disk -> text in pieces of bounded size, exactly: no newline is translated."""

import bz2
import gzip
import lzma
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path, PurePath
from typing import Any, BinaryIO, Literal, NamedTuple

import zstandard

from lmlong.data.encoding import UTF8, decode
from lmlong.errors import UsageError

CHUNK = 1 << 16
# Bounds the size of one decompressed chunk: a zstd block of four bytes may stand for 128 kB.
COMPRESSED_CHUNK = 1 << 10
COMPRESSED = (".gz", ".zst", ".bz2", ".xz")

RATIO, HARMLESS = 1000, 1 << 30
"""A file that unpacks to so many times its size, and to more bytes than that, is refused: it may be a bomb."""


Errors = Literal["strict", "replace"]


class Measure(NamedTuple):
    """Hash and size of a document, from one pass over it; `digest` depends on nothing but the text."""

    digest: bytes
    bytes: int  # of the text in UTF-8: those read in UTF-8, less those replaced, plus their replacements
    read_bytes: int  # of the document as stored
    replaced_bytes: int  # read, but not of the encoding
    put_in_bytes: int  # of U+FFFD, in the place of those


class Skipped(NamedTuple):
    """A document that is left out, with the reason."""

    name: str
    reason: str
    bytes: int = 0


@dataclass(frozen=True)
class Document:
    """A text that can be read any number of times, a piece at a time."""

    name: str
    chunks: Callable[[], Iterator[bytes]]
    errors: Errors = "strict"
    encoding: str = UTF8
    fields: Mapping[str, Any] = field(default_factory=dict)
    """What is known of it beside its text: the file and folder it lies in, or the fields of its record."""

    def pieces(self) -> Iterator[str]:
        """Iterate over the text as strings of bounded size, none of them empty."""
        return (piece for piece, _ in decode(self.chunks(), self.name, self.errors, self.encoding))

    def measure(self) -> Measure:
        """Return the hash and size of the document, read once."""
        digest, size, read, replaced, mark = sha256(), 0, 0, 0, 0

        def counted() -> Iterator[bytes]:
            nonlocal read, mark
            for chunk in self.chunks():
                if not read and self.encoding == "utf-8-sig" and chunk.startswith(BOM_UTF8):
                    mark = len(BOM_UTF8)
                read += len(chunk)
                yield chunk

        for piece, bad in decode(counted(), self.name, self.errors, self.encoding):
            data = piece.encode()
            digest.update(data)
            size, replaced = size + len(data), replaced + bad
        is_utf8 = self.encoding in (UTF8, "utf-8-sig")
        put_in = size - (read - mark - replaced) if is_utf8 else replaced * len("\ufffd".encode())
        return Measure(digest.digest(), size, read, replaced, put_in)


def file_document(path: Path, errors: Errors, encoding: str = UTF8) -> Document:
    """Return a whole file as one document."""
    return Document(str(path), lambda: read(path), errors, encoding, place_of(path))


def place_of(path: PurePath) -> dict[str, str]:
    """Return the fields of a document that is a file."""
    return {"file": path.name, "folder": path.parent.name}


def text_document(name: str, text: str, errors: Errors, fields: Mapping[str, Any] | None = None) -> Document:
    """Return a text in memory as a document; a lone surrogate in it is an error like any other."""
    data = text.encode("utf-8", "surrogatepass")
    return Document(name, lambda: slices(data), errors, fields=fields or {})


OPENERS: Mapping[str, Callable[[BinaryIO], Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}

DAMAGED = (gzip.BadGzipFile, zlib.error, zstandard.ZstdError, lzma.LZMAError, EOFError)
"""Errors of a compressed file; `bz2` raises an OSError without a number."""


def read(path: Path, decompress: bool = True) -> Iterator[bytes]:
    """Iterate over the bytes of a file in chunks, decompressed if its name ends in .gz, .zst, .bz2 or .xz."""
    suffix = path.suffix.lower() if decompress else ""
    try:
        with path.open("rb") as file:
            yield from _bounded(path, decompressed(file, suffix)) if suffix in COMPRESSED else _chunks(file, CHUNK)
    except DAMAGED as error:
        raise UsageError(f"{path}: damaged or not a {path.suffix} file ({error}).") from None
    except OSError as error:
        if suffix == ".bz2" and error.errno is None:  # bz2 has no error of its own
            raise UsageError(f"{path}: damaged or not a .bz2 file ({error}).") from None
        raise UsageError(f"{path}: cannot be read ({error.strerror or error}).") from None


def decompressed(file: BinaryIO, suffix: str) -> Iterator[bytes]:
    """Iterate over the content of a compressed file in chunks of bounded size."""
    return _decompress_zst(file) if suffix == ".zst" else _chunks(OPENERS[suffix](file), CHUNK)


def _bounded(path: Path, chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Iterate over unpacked chunks, as long as they are not too many for a file of this size."""
    left = max(RATIO * path.stat().st_size, HARMLESS)
    for chunk in chunks:
        left -= len(chunk)
        if left < 0:
            raise UsageError(f"{path}: unpacks to more than {RATIO:,} times its size. Unpack it, if it is no bomb.")
        yield chunk


def slices(data: bytes) -> Iterator[bytes]:
    """Iterate over bytes in memory, in chunks."""
    return (data[start : start + CHUNK] for start in range(0, len(data), CHUNK))


def _chunks(file: BinaryIO, size: int) -> Iterator[bytes]:
    while chunk := file.read(size):
        yield chunk


def _decompress_zst(file: BinaryIO) -> Iterator[bytes]:
    """Decompress all frames of a zstd file; unlike the library's stream reader, this notices a truncated last one."""
    frame = None
    for data in _chunks(file, COMPRESSED_CHUNK):
        while data:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            yield from slices(frame.decompress(data))
            data = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
    if frame:
        raise EOFError("it ends in the middle")
