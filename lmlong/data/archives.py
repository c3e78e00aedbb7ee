"""Archives: the files of a ZIP or TAR are documents, as those of a folder are."""

import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple

from lmlong.data.encoding import find_encoding
from lmlong.data.reading import Document, Errors, Skipped, place_of, slices

KINDS = (".zip", ".tar", ".tgz", ".tbz2", ".txz", ".tar.gz", ".tar.bz2", ".tar.xz")

LARGEST = 1 << 28
"""Bytes of the largest file that is unpacked."""

RATIO, HARMLESS = 1000, 1 << 30
"""An archive that unpacks to so many times its size, and to more bytes than that, is read no further."""

DAMAGED = (
    zipfile.BadZipFile,
    tarfile.TarError,
    lzma.LZMAError,
    zlib.error,
    EOFError,
    OSError,
    ValueError,
    NotImplementedError,
)


class Member(NamedTuple):
    """A file of an archive."""

    name: str
    size: int  # as the archive says
    is_file: bool
    open: Callable[[], IO[bytes] | None]


def is_archive(path: Path) -> bool:
    return path.name.lower().endswith(KINDS) and not path.name.startswith(".")


def archive_documents(
    path: Path, errors: Errors, encoding: str, why_not: Callable[[PurePosixPath], str | None]
) -> Iterator[Document | Skipped]:
    """Iterate over the files of an archive; `why_not` says why one is not read."""
    left = max(RATIO * path.stat().st_size, HARMLESS)
    try:
        for member in _members(path):
            inside = PurePosixPath(member.name)
            name = f"{path}/{inside}"
            if not member.is_file:
                continue
            if member.size > left:
                yield Skipped(
                    name, f"{path.name} unpacks to more than {RATIO} times its size: read up to there", member.size
                )
                return
            if reason := why_not(inside):
                yield Skipped(name, reason, member.size)
                continue
            data = _content(member)
            if isinstance(data, str):
                yield Skipped(name, data, member.size)
                continue
            left -= len(data)
            yield _document(name, inside, data, errors, encoding)
    except DAMAGED as error:
        yield Skipped(
            str(path), f"a damaged archive, read up to there ({error or type(error).__name__})", path.stat().st_size
        )


def _document(name: str, inside: PurePosixPath, data: bytes, errors: Errors, encoding: str) -> Document | Skipped:
    if not data:
        return Skipped(name, "empty")
    chunks = lambda: slices(data)  # noqa: E731
    found = find_encoding(chunks, name, encoding) if errors == "strict" else encoding.replace("auto", "utf-8")
    return Document(name, chunks, errors, found, place_of(inside))


def _content(member: Member) -> bytes | str:
    """Return the bytes of a file, or why there are none; what it says of its size need not be true."""
    if member.size > LARGEST:
        return f"larger than {LARGEST >> 20} MB: unpack it"
    try:
        with member.open() as file:  # type: ignore[union-attr]
            data = file.read(LARGEST + 1)
    except RuntimeError as error:
        return "encrypted" if "password" in str(error) else f"damaged ({error})"
    except DAMAGED as error:
        return f"damaged ({error or type(error).__name__})"
    return data if len(data) <= LARGEST else f"larger than {LARGEST >> 20} MB: unpack it"


def _members(path: Path) -> Iterator[Member]:
    if path.name.lower().endswith(".zip"):
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                yield Member(entry.filename, entry.file_size, not entry.is_dir(), partial(archive.open, entry))
        return
    with tarfile.open(path, "r|*") as stream:  # a stream: nothing is unpacked twice
        for item in stream:
            yield Member(item.name, item.size, item.isreg(), partial(stream.extractfile, item))
