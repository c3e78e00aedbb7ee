"""The table of file formats, by suffix, media type and first bytes."""

from functools import partial
from pathlib import Path, PurePath

from lmlong.data.converters.office import EPUB_TYPE
from lmlong.data.document import Document, Skipped
from lmlong.data.encoding import UTF8, EncodingError, find_encoding, marked
from lmlong.data.formats.archives import Archive
from lmlong.data.formats.base import PLAIN_SUFFIXES, FileFormat, PlainText, RefusedFormat, file_document, suffix_of
from lmlong.data.formats.compression import COMPRESSED, read_bytes
from lmlong.data.formats.converted import ConvertedDocument
from lmlong.data.formats.datasets import Records
from lmlong.data.formats.fasta import Fasta
from lmlong.errors import UsageError

PLAIN, ARCHIVE, FASTA, DOCUMENT = PlainText(), Archive(), Fasta(), ConvertedDocument()
MARKUP = PlainText("markup: convert it to plain text, or name it to read it with its tags")
UNKNOWN = PlainText("unknown format: name it to read it as plain text")
OLD_DOCUMENT = RefusedFormat("an unsupported document format: save it as .docx or plain text")
OLD_ARCHIVE = RefusedFormat("an unsupported archive format: unpack it")
OTHER_E_BOOK = RefusedFormat("an unsupported e-book format: convert it to EPUB or plain text")

FORMATS: dict[str, FileFormat] = {
    **dict.fromkeys(PLAIN_SUFFIXES, PLAIN),
    ".jsonl": Records("json"),
    ".ndjson": Records("json"),
    ".parquet": Records("parquet", is_text=False),
    ".arrow": Records("arrow", is_text=False),
    ".fa": FASTA,
    ".fasta": FASTA,
    ".fna": FASTA,
    ".faa": FASTA,
    ".json": Records("json", only_if_named=True),
    ".csv": Records("csv", only_if_named=True),
    ".tsv": Records("csv", only_if_named=True),
    ".epub": DOCUMENT,
    ".docx": DOCUMENT,
    ".pdf": ConvertedDocument(package="pypdfium2"),
    ".html": DOCUMENT,
    ".htm": DOCUMENT,
    ".xhtml": DOCUMENT,
    ".zip": ARCHIVE,
    ".tar": Archive(compressions=(".gz", ".bz2", ".xz")),
    ".tgz": ARCHIVE,
    ".tbz2": ARCHIVE,
    ".txz": ARCHIVE,
    ".xml": MARKUP,
    ".svg": MARKUP,
    ".7z": OLD_ARCHIVE,
    ".rar": OLD_ARCHIVE,
    ".doc": OLD_DOCUMENT,
    ".odt": OLD_DOCUMENT,
    ".rtf": OLD_DOCUMENT,
    ".mobi": OTHER_E_BOOK,
    ".azw3": OTHER_E_BOOK,
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


def format_of(path: PurePath) -> FileFormat:
    """Return the format of a file by its name."""
    file_format = FORMATS.get(suffix_of(path), UNKNOWN)
    if _is_compressed(path) and path.suffix.lower() not in file_format.compressions:
        return file_format.compressed or UNKNOWN
    return file_format


def text_file(path: Path) -> Document:
    """Return the text of a file as one document, records and sequences as they are written.

    Raises an EncodingError if the file cannot be decoded, or another UsageError if it is not one text.
    """
    file_format = format_of(path)
    if file_format.refusal:
        raise UsageError(f"{path}: {file_format.refusal}.")
    if isinstance(file_format, ConvertedDocument):
        document = file_format.convert(path)
        if isinstance(document, Skipped):
            raise UsageError(f"{path}: {document.reason}. Use another file.")
        return document
    if not file_format.is_text:
        raise UsageError(f"{path}: holds several texts. Unpack it, and name one of them.")
    try:
        return file_document(path, "strict", find_encoding(partial(read_bytes, path), str(path), "auto"))
    except EncodingError as error:
        raise EncodingError(error.what, "Convert the file to UTF-8.") from None


def is_plain(path: Path) -> bool:
    """Return whether a file is UTF-8 without a byte order mark and not compressed, by its name and first bytes."""
    return format_of(path).is_text and not _is_compressed(path) and not marked(next(read_bytes(path), b""))


def is_utf8(path: Path, document: Document) -> bool:
    """Return whether the text of a file equals its bytes."""
    return document.encoding == UTF8 and format_of(path).is_text and not _is_compressed(path)


def _is_compressed(path: PurePath) -> bool:
    return path.suffix.lower() in COMPRESSED
