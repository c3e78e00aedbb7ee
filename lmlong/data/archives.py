"""Archives: the files of a ZIP or TAR are documents, as those of a folder are."""

import tarfile
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple

from lmlong.data.encoding import UTF8, EncodingError, find_encoding
from lmlong.data.reading import Document, Errors, Skipped, place_of, slices

KINDS = (".zip", ".tar", ".tgz", ".tbz2", ".txz", ".tar.gz", ".tar.bz2", ".tar.xz")

LARGEST = 1 << 28
"""Bytes of the largest file that is unpacked."""

RATIO, HARMLESS = 1000, 1 << 30
"""An archive that unpacks to more than RATIO times its size, and to more than HARMLESS bytes, is read no further."""

LARGEST_HEADER = 1 << 20
"""Bytes of the longest name or other header of a TAR, which `tarfile` reads into memory."""


class Damaged(Exception):
    """An archive that cannot be read on."""


class Member(NamedTuple):
    """A file of an archive."""

    name: str
    size: int  # as the archive says
    is_file: bool
    open: Callable[[], IO[bytes] | None]


class BoundedHeader(tarfile.TarInfo):
    """A header of a TAR that is refused when it is too long."""

    HEADERS = (
        *(tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE),
        *(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK),
    )

    def _proc_member(self, tarfile_: tarfile.TarFile) -> Any:
        if self.size < 0 or (self.type in self.HEADERS and self.size > LARGEST_HEADER):
            raise tarfile.ReadError(f"a header with a size of {self.size:,} bytes")
        return super()._proc_member(tarfile_)  # type: ignore[misc]


def is_archive(path: Path) -> bool:
    return path.name.lower().endswith(KINDS) and not path.name.startswith(".")


def archive_documents(
    path: Path, errors: Errors, encoding: str, why_not: Callable[[PurePosixPath], str | None]
) -> Iterator[Document | Skipped]:
    """Iterate over the files of an archive; `why_not` returns why one is not read.

    All members count against the limit, also those that are left out: a compressed TAR is unpacked to get past them.
    """
    left = max(RATIO * path.stat().st_size, HARMLESS)
    try:
        for member in _members(path):
            inside = PurePosixPath(member.name)
            # a terminal would act on control characters in a name
            name = f"{path}/" + "".join(each if each.isprintable() else "\ufffd" for each in str(inside))
            left -= member.size
            if left < 0:
                yield Skipped(
                    name, f"{path.name} unpacks to more than {RATIO} times its size: read up to there", member.size
                )
                return
            if not member.is_file:
                continue
            if reason := why_not(inside):
                yield Skipped(name, reason, member.size)
                continue
            data = _content(member)
            if isinstance(data, str):
                yield Skipped(name, data, member.size)
                continue
            yield _document(name, inside, data, errors, encoding)
    except Damaged as error:
        yield Skipped(str(path), f"a damaged archive, read up to there ({error})", path.stat().st_size)


def _document(name: str, inside: PurePosixPath, data: bytes, errors: Errors, encoding: str) -> Document | Skipped:
    if not data:
        return Skipped(name, "empty")
    chunks = lambda: slices(data)  # noqa: E731
    if errors != "strict":
        return Document(name, chunks, errors, encoding.replace("auto", UTF8), place_of(inside))
    try:
        return Document(name, chunks, errors, find_encoding(chunks, name, encoding), place_of(inside))
    except EncodingError as error:
        return Skipped(name, error.reason, len(data))


def _content(member: Member) -> bytes | str:
    """Return the bytes of a file, or why there are none; what it says of its size need not be true."""
    if member.size > LARGEST:
        return f"larger than {LARGEST >> 20} MB: unpack it"
    try:
        with member.open() as file:  # type: ignore[union-attr]
            data = file.read(LARGEST + 1)
    except Exception as error:  # zipfile, tarfile, zlib, bz2 and lzma raise a dozen types for damaged files
        is_locked = isinstance(error, RuntimeError) and "password" in str(error)
        return "encrypted" if is_locked else f"damaged ({error or type(error).__name__})"
    return data if len(data) <= LARGEST else f"larger than {LARGEST >> 20} MB: unpack it"


def _members(path: Path) -> Iterator[Member]:
    """Iterate over the members of an archive up to where it is damaged."""
    members = _zip_members(path) if path.name.lower().endswith(".zip") else _tar_members(path)
    while True:
        try:
            member = next(members, None)
        except Exception as error:  # see `_content`
            raise Damaged(error or type(error).__name__) from None
        if member is None:
            return
        yield member


def _zip_members(path: Path) -> Iterator[Member]:
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            yield Member(entry.filename, entry.file_size, not entry.is_dir(), partial(archive.open, entry))


def _tar_members(path: Path) -> Iterator[Member]:
    with tarfile.open(path, "r|*", tarinfo=BoundedHeader) as stream:  # a stream: nothing is unpacked twice
        for item in stream:
            yield Member(item.name, item.size, item.isreg(), partial(stream.extractfile, item))
