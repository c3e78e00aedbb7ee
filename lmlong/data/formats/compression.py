"""The bytes of files: decompressed by their suffix, in chunks of bounded size."""

import bz2
import gzip
import lzma
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any, BinaryIO

import zstandard

from lmlong.errors import UsageError

CHUNK = 1 << 16

COMPRESSED = (".gz", ".zst", ".bz2", ".xz")

COMPRESSED_CHUNK = 1 << 10
"""Bytes of a .zst that are decompressed at once, which bounds the result: a block of four bytes may expand to 128
kB."""

RATIO, HARMLESS = 1000, 1 << 30
"""A file that expands to more than RATIO times its size, and to more than HARMLESS bytes, is not read further: it may
be a decompression bomb."""

OPENERS: Mapping[str, Callable[[BinaryIO], Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}

DAMAGED = (gzip.BadGzipFile, zlib.error, zstandard.ZstdError, lzma.LZMAError, EOFError)
"""Errors of a compressed file; `bz2` raises an OSError without a number."""


def is_compressed(path: PurePath) -> bool:
    """Return whether a file is compressed, by its name."""
    return path.suffix.lower() in COMPRESSED


def suffix_of(path: PurePath) -> str:
    """Return the suffix that determines the format, in lower case and without that of a compression."""
    return PurePath(path.stem).suffix.lower() if is_compressed(path) else path.suffix.lower()


def slices(data: bytes) -> Iterator[bytes]:
    """Yield bytes in memory in chunks."""
    return (data[start : start + CHUNK] for start in range(0, len(data), CHUNK))


def read_bytes(path: Path, decompress: bool = True) -> Iterator[bytes]:
    """Iterate over the bytes of a file in chunks, decompressed if its name ends in .gz, .zst, .bz2 or .xz."""
    suffix = path.suffix.lower() if decompress else ""
    try:
        with path.open("rb") as file:
            yield from _bounded(path, decompressed(file, suffix)) if suffix in COMPRESSED else _chunks(file, CHUNK)
    except DAMAGED as error:
        raise UsageError(f"{path}: damaged or not a {path.suffix} file ({error}).") from None
    except OSError as error:
        if suffix == ".bz2" and error.errno is None:  # bz2 has no exception of its own
            raise UsageError(f"{path}: damaged or not a .bz2 file ({error}).") from None
        raise UsageError(f"{path}: cannot be read ({error.strerror or error}).") from None


def decompressed(file: BinaryIO, suffix: str) -> Iterator[bytes]:
    """Iterate over the content of a compressed file in chunks of bounded size."""
    return _decompress_zst(file) if suffix == ".zst" else _chunks(OPENERS[suffix](file), CHUNK)


def expansion_limit(path: Path) -> int:
    """Return the number of bytes that a compressed file may expand to."""
    return max(RATIO * path.stat().st_size, HARMLESS)


def _bounded(path: Path, chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Iterate over decompressed chunks up to the limit for a file of this size."""
    left = expansion_limit(path)
    for chunk in chunks:
        left -= len(chunk)
        if left < 0:
            raise UsageError(f"{path}: expands to more than {RATIO:,} times its size. Unpack it if you trust it.")
        yield chunk


def _chunks(file: BinaryIO, size: int) -> Iterator[bytes]:
    while chunk := file.read(size):
        yield chunk


def _decompress_zst(file: BinaryIO) -> Iterator[bytes]:
    """Decompress all frames of a zstd file. Unlike the stream reader of the library, this detects a truncated last
    frame."""
    frame = None
    for data in _chunks(file, COMPRESSED_CHUNK):
        while data:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            yield from slices(frame.decompress(data))
            data = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
    if frame:
        raise EOFError("truncated")
