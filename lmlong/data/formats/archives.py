"""Archives: the plain text files in a ZIP or TAR are documents."""

import tarfile
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple

from lmlong.data.document import Document, ReadOptions, Skipped, file_fields
from lmlong.data.encoding import UTF8, EncodingError, find_encoding
from lmlong.data.formats.compression import RATIO, expansion_limit, slices

PLAIN_SUFFIXES = (".txt", ".md", ".py")

LARGEST = 1 << 28
"""Bytes of the largest file that is unpacked."""
TOO_LARGE = f"larger than {LARGEST >> 20} MB: unpack it"

LARGEST_HEADER = 1 << 20
"""Bytes of the largest header of a TAR, which `tarfile` reads into memory."""


class Member(NamedTuple):
    """A file of an archive."""

    name: str
    size: int  # as declared by the archive
    is_file: bool
    open: Callable[[], IO[bytes] | None]


class BoundedHeader(tarfile.TarInfo):
    """A header of a TAR, with a maximum size."""

    HEADERS = (
        *(tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE),
        *(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK),
    )

    def _proc_member(self, tarfile_: tarfile.TarFile) -> Any:
        if self.size < 0 or (self.type in self.HEADERS and self.size > LARGEST_HEADER):
            raise tarfile.ReadError(f"a header with a size of {self.size:,} bytes")
        return super()._proc_member(tarfile_)  # type: ignore[misc]


def files_inside(path: Path, options: ReadOptions) -> Iterator[Document | Skipped]:
    """Iterate over the files in a ZIP or TAR; the limits hold for any content, whatever sizes its headers declare."""
    # skipped members count too: a compressed TAR is unpacked to get past them
    left = expansion_limit(path)
    members = _zip_members(path) if path.name.lower().endswith(".zip") else _tar_members(path)
    while True:
        try:
            member = next(members, None)
        except Exception as error:  # see `_content`
            reason = f"a damaged archive, of which the rest is not read ({_named(error)})"
            yield Skipped(str(path), reason, path.stat().st_size)
            return
        if member is None:
            return
        inside = PurePosixPath(member.name)
        # a terminal would interpret control characters in a name
        name = f"{path}/" + "".join(char if char.isprintable() else "\ufffd" for char in str(inside))
        left -= member.size
        if left < 0:
            reason = f"{path.name} expands to more than {RATIO} times its size: the rest is not read"
            yield Skipped(name, reason, member.size)
            return
        if member.is_file:
            content = _skip_reason(inside) or _content(member)
            if isinstance(content, str):
                yield Skipped(name, content, member.size)
            else:
                yield _document(name, inside, content, options)


def _skip_reason(path: PurePosixPath) -> str | None:
    """Return why a file in an archive is skipped, or None if it is read."""
    if any(part.startswith(".") for part in path.parts):
        return "hidden"
    if path.suffix.lower() in PLAIN_SUFFIXES:
        return None
    return "inside an archive only plain text is read: unpack it"


def _document(name: str, inside: PurePosixPath, data: bytes, options: ReadOptions) -> Document | Skipped:
    if not data:
        return Skipped(name, "empty")
    chunks = lambda: slices(data)  # noqa: E731
    encoding = options.encoding.replace("auto", UTF8)
    try:
        if options.errors == "strict":
            encoding = find_encoding(chunks, name, options.encoding)
    except EncodingError as error:
        return Skipped(name, error.reason, len(data))
    return Document(name, chunks, options.errors, encoding, file_fields(inside))


def _content(member: Member) -> bytes | str:
    """Return the bytes of a file, or the reason why it cannot be read; its declared size may be wrong."""
    if member.size > LARGEST:
        return TOO_LARGE
    try:
        with member.open() as file:  # type: ignore[union-attr]
            data = file.read(LARGEST + 1)
    except Exception as error:  # zipfile, tarfile, zlib, bz2 and lzma raise a dozen types for damaged files
        is_locked = isinstance(error, RuntimeError) and "password" in str(error)
        return "encrypted" if is_locked else f"damaged ({_named(error)})"
    return data if len(data) <= LARGEST else TOO_LARGE


def _named(error: Exception) -> str:
    return str(error) or type(error).__name__


def _zip_members(path: Path) -> Iterator[Member]:
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            yield Member(entry.filename, entry.file_size, not entry.is_dir(), partial(archive.open, entry))


def _tar_members(path: Path) -> Iterator[Member]:
    with tarfile.open(path, "r|*", tarinfo=BoundedHeader) as stream:  # a stream: nothing is unpacked twice
        for item in stream:
            yield Member(item.name, item.size, item.isreg(), partial(stream.extractfile, item))
