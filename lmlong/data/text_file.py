"""The text of one file, read as training reads it: documents, compressed files, encodings with a byte order mark."""

from functools import partial
from pathlib import Path

from lmlong.data import documents as converted
from lmlong.data.archives import is_archive
from lmlong.data.encoding import UTF8, EncodingError, find_encoding, marked
from lmlong.data.files import is_document, kind, why_not_text
from lmlong.data.reading import COMPRESSED, Document, file_document, place_of, read, slices
from lmlong.errors import UsageError

SEVERAL = (".parquet", ".arrow")


def converted_document(path: Path) -> Document:
    """Return a document of a word processor, an e-book, a page or a PDF as text; a ConversionError if it has none."""
    if not converted.converted(path, kind(path)):
        raise converted.ConversionError("no text in it")
    return Document(str(path), lambda: slices(converted.converted(path, kind(path))), fields=place_of(path))


def text_file(path: Path) -> Document:
    """Return the text of a file that is read as one text. A file that cannot be decoded raises an EncodingError, any
    other that holds no text another UsageError."""
    if reason := why_not_text(path):
        raise UsageError(f"{path}: {reason}.")
    if is_archive(path) or kind(path) in SEVERAL:
        raise UsageError(f"{path}: holds several texts. Unpack it, and name one.")
    if is_document(path):
        try:
            return converted_document(path)
        except converted.ConversionError as error:
            raise UsageError(f"{path}: cannot be converted to text ({error}). Use another file.") from None
    try:
        return file_document(path, "strict", find_encoding(partial(read, path), str(path), "auto"))
    except EncodingError as error:
        raise EncodingError(error.what, "Convert the file to UTF-8.") from None


def is_plain(path: Path) -> bool:
    """Return whether a file is read as plain text by its name and its first bytes."""
    stored = is_document(path) or is_archive(path) or kind(path) in SEVERAL or path.suffix.lower() in COMPRESSED
    return not stored and not why_not_text(path) and not marked(next(read(path), b""))


def is_utf8(path: Path, document: Document) -> bool:
    """Return whether the text of a file is its bytes."""
    return document.encoding == UTF8 and not is_document(path) and path.suffix.lower() not in COMPRESSED
