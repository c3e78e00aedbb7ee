"""The table of file formats, by suffix, media type and first bytes."""

from collections import deque
from collections.abc import Callable, Container, Iterator
from functools import lru_cache, partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path, PurePath
from typing import NamedTuple

from lmlong.data.converters.office import EPUB_TYPE
from lmlong.data.document import Document, ReadOptions, Skipped
from lmlong.data.encoding import UTF8, EncodingError, find_encoding, marked
from lmlong.data.formats.archives import PLAIN_SUFFIXES, files_inside
from lmlong.data.formats.compression import COMPRESSED, is_compressed, read_bytes, suffix_of
from lmlong.data.formats.converted import converted, converter
from lmlong.data.formats.datasets import first_line_has_column, records, schema_has_column
from lmlong.data.formats.fasta import sequences
from lmlong.errors import UsageError, install_command

LARGE = 1 << 22
"""Size of a plain file in bytes from which `quick_check` does not decode it."""


def _refused(path: Path, options: ReadOptions) -> Iterator[Document | Skipped]:
    raise UsageError(f"{path}: {format_of(path).refusal}.")


class Format(NamedTuple):
    """How the files of a suffix are read."""

    documents: Callable[[Path, ReadOptions], Iterator[Document | Skipped]] = _refused
    """Iterates over the documents of a file; raises a UsageError if it cannot be read."""
    is_text: bool = False
    """Whether the bytes of a file, once decompressed, are text."""
    is_whole: bool = False
    """Whether a file is one document."""
    trial: int | None = None
    """The number of documents that `mistake` reads; None for all."""
    quick_check: Callable[[Path, ReadOptions], bool] = lambda path, options: True
    """Returns whether a first look at a file finds no mistake; `mistake` decides."""
    depends_on: Callable[[Path, ReadOptions], str] = lambda path, options: ""
    """Returns what the text of a file depends on besides its bytes, its suffixes and the column."""
    only_if_named: str = ""
    """Why a folder skips a file that is not named; {column} stands for the column of the text."""
    refused: str | None = None
    """Why no file is read, even if it is named."""
    package: str | None = None
    """The package of the extra `documents` that reads the files."""
    compressions: Container[str] = COMPRESSED
    """Suffixes of the compressions that are decompressed."""

    @property
    def refusal(self) -> str | None:
        """Why a file is not read even if it is named, or None."""
        if self.package and find_spec(self.package) is None:
            return f"{self.package} is not installed: run {install_command('documents')}"
        return self.refused

    def skip_reason(self, column: str) -> str | None:
        """Return why a folder skips a file that is not named, or None if it is read."""
        return self.refusal or self.only_if_named.format(column=column) or None

    def mistake(self, path: Path, options: ReadOptions) -> UsageError | None:
        """Return why a file cannot be read, or None."""
        try:
            deque(islice(self.documents(path, options), self.trial), maxlen=0)
        except UsageError as error:
            return error
        return None

    def fingerprint(self, path: Path, options: ReadOptions) -> str:
        """Return what the text of a file depends on in addition to its bytes."""
        return f"{options.column} {suffix_of(path)} {path.suffix}{self.depends_on(path, options)}"


def _plain(path: Path, options: ReadOptions) -> Iterator[Document]:
    yield Document.of_file(path, options.errors, _encoding(path, options))


def _encoding(path: Path, options: ReadOptions) -> str:
    """Return the encoding of a plain file, or raise a UsageError if it cannot be determined."""
    if options.errors == "replace":
        return _declared_encoding(path, options) or UTF8
    about = path.stat()
    return _found_encoding(path, options.encoding, about.st_mtime_ns, about.st_size)


@lru_cache(maxsize=1 << 16)
def _found_encoding(path: Path, requested: str, changed: int, size: int) -> str:
    """Find the encoding once of a file that is read several times."""
    return find_encoding(partial(read_bytes, path), str(path), requested)


def _declared_encoding(path: Path, options: ReadOptions) -> str | None:
    """Return the encoding of a plain file by the recipe or its byte order mark."""
    if options.encoding != "auto":
        return options.encoding
    try:
        return marked(next(read_bytes(path), b""))
    except UsageError:  # damaged, which `mistake` reports
        return None


def _plain_depends_on(path: Path, options: ReadOptions) -> str:
    declared = _declared_encoding(path, options)
    return f" as {declared} {options.encoding}" if declared else ""


def _is_decodable(path: Path, options: ReadOptions) -> bool:
    try:
        if options.errors == "strict" and path.stat().st_size < LARGE:
            _encoding(path, options)
        return True
    except UsageError:
        return False


def _records(builder: str, is_text: bool = True) -> Format:
    """Return the format of records that a builder of `datasets` reads."""
    return Format(
        partial(records, builder),
        is_text=is_text,
        trial=1,
        depends_on=lambda path, options: f" as {builder} {options.encoding}",
    )


PLAIN = Format(
    _plain,
    is_text=True,
    is_whole=True,
    trial=1,
    quick_check=_is_decodable,
    depends_on=_plain_depends_on,
)
MARKUP = PLAIN._replace(only_if_named="markup: convert it to plain text, or name it to read it with its tags")
UNKNOWN = PLAIN._replace(only_if_named="unknown format: name it to read it as plain text")
MAYBE_RECORDS = "may hold no records: name it to read its column '{column}'"
LINES = _records("json")._replace(quick_check=first_line_has_column)
ARROW = _records("arrow", is_text=False)
ARROW_CACHE = ARROW._replace(only_if_named="a cache of `datasets`")
FASTA = Format(sequences, is_text=True, depends_on=lambda path, options: f" soft masks {options.soft_masks}")
ARCHIVE = Format(files_inside, depends_on=lambda path, options: f" archive {options.encoding}", compressions=())
# a document that cannot be converted is skipped
DOCUMENT = Format(converted, is_whole=True, trial=0, depends_on=converter, compressions=())
PDF = DOCUMENT._replace(depends_on=partial(converter, package="pypdfium2"), package="pypdfium2")
COMPRESSED_DOCUMENT = Format(refused="a compressed document: unpack it")
OLD_DOCUMENT = Format(refused="an unsupported document format: save it as .docx or plain text")
OLD_ARCHIVE = Format(refused="an unsupported archive format: unpack it")
OTHER_E_BOOK = Format(refused="an unsupported e-book format: convert it to EPUB or plain text")

FORMATS: dict[str, Format] = {
    **dict.fromkeys(PLAIN_SUFFIXES, PLAIN),
    **dict.fromkeys((".jsonl", ".ndjson"), LINES),
    ".parquet": _records("parquet", is_text=False)._replace(quick_check=schema_has_column),
    ".arrow": ARROW,
    **dict.fromkeys((".fa", ".fasta", ".fna", ".faa"), FASTA),
    ".json": _records("json")._replace(only_if_named=MAYBE_RECORDS),
    **dict.fromkeys((".csv", ".tsv"), _records("csv")._replace(only_if_named=MAYBE_RECORDS)),
    **dict.fromkeys((".epub", ".docx"), DOCUMENT),
    ".pdf": PDF,
    **dict.fromkeys((".html", ".htm", ".xhtml"), DOCUMENT),
    ".zip": ARCHIVE,
    ".tar": ARCHIVE._replace(compressions=(".gz", ".bz2", ".xz")),
    **dict.fromkeys((".tgz", ".tbz2", ".txz"), ARCHIVE),
    **dict.fromkeys((".xml", ".svg"), MARKUP),
    **dict.fromkeys((".7z", ".rar"), OLD_ARCHIVE),
    **dict.fromkeys((".doc", ".odt", ".rtf"), OLD_DOCUMENT),
    **dict.fromkeys((".mobi", ".azw3"), OTHER_E_BOOK),
}
"""Suffix -> format; files of other suffixes are of the format UNKNOWN."""

MEDIA_TYPES = {
    ".epub": EPUB_TYPE,
    ".docx": "application/vnd.openxmlformats-officedocument.wordprocessingml.document",
    ".pdf": "application/pdf",
    ".html": "text/html",
    ".htm": "text/html",
    ".xhtml": "application/xhtml+xml",
    ".gz": "application/gzip",
    ".zst": "application/zstd",
    ".bz2": "application/x-bzip2",
    ".xz": "application/x-xz",
}
"""Suffix -> media type, of documents and compressed files."""

SUFFIXES = {media_type: suffix for suffix, media_type in MEDIA_TYPES.items()}

FIRST_BYTES = {
    b"PK\3\4": ".zip",  # EPUB and DOCX too
    b"%PDF-": ".pdf",
    b"\x1f\x8b": ".gz",
    b"\x28\xb5\x2f\xfd": ".zst",
    **{b"BZh%d1AY&SY" % level: ".bz2" for level in range(1, 10)},
    b"\xfd7zXZ\0": ".xz",
    b"\xd0\xcf\x11\xe0": ".doc",
    b"{\\rtf": ".rtf",
}
"""First bytes -> suffix, of files that are not plain text."""


def suffix_of_bytes(data: bytes) -> str | None:
    """Return the suffix that the first bytes of a file imply, or None for plain text."""
    return next((suffix for first, suffix in FIRST_BYTES.items() if data.startswith(first)), None)


def format_of(path: PurePath) -> Format:
    """Return the format of a file by its name."""
    file_format = FORMATS.get(suffix_of(path), UNKNOWN)
    if file_format is ARROW and path.name.startswith("cache-"):
        return ARROW_CACHE
    if is_compressed(path) and path.suffix.lower() not in file_format.compressions:
        return COMPRESSED_DOCUMENT if file_format.is_whole else UNKNOWN
    return file_format


def text_file(path: Path) -> Document:
    """Return the text of a file as one document, records and sequences as they are written.

    Raises an EncodingError if the file cannot be decoded, or another UsageError if it is not one text.
    """
    file_format = format_of(path)
    if file_format.refusal:
        raise UsageError(f"{path}: {file_format.refusal}.")
    if file_format.is_text:
        try:
            return Document.of_file(path, encoding=_encoding(path, ReadOptions()))
        except EncodingError as error:
            raise error.with_remedy("Convert the file to UTF-8.") from None
    if not file_format.is_whole:
        raise UsageError(f"{path}: holds several texts. Unpack it, and name one of them.")
    (document,) = file_format.documents(path, ReadOptions())
    if isinstance(document, Skipped):
        raise UsageError(f"{path}: {document.reason}. Use another file.")
    return document


def is_plain(path: Path) -> bool:
    """Return whether a file is UTF-8 without a byte order mark and not compressed, by its name and first bytes."""
    return format_of(path).is_text and not is_compressed(path) and not marked(next(read_bytes(path), b""))


def is_utf8(path: Path, document: Document) -> bool:
    """Return whether the text of a file equals its bytes."""
    return document.encoding == UTF8 and format_of(path).is_text and not is_compressed(path)
