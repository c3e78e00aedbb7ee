"""Detect the encoding of plain text by its byte order mark, or by decoding all of it strictly."""

import codecs
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from lmlong.errors import UsageError

UTF8 = "utf-8"
MARKS = {  # UTF-32 first: its little-endian mark begins with UTF-16's
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
"""Encodings by byte order mark. Python's decoders of these names remove the mark."""

WESTERN = "windows-1252"
ASCII, BEYOND_ASCII = bytes(range(128)), bytes(range(128, 256))
CONTROLS = re.compile(rb"[\0-\x08\x0e-\x19\x1c-\x1f\x7f]")

PLACEHOLDER = "\udc80"
"""A lone surrogate, which valid text does not contain. It stands for each byte to replace, so that they can be
counted."""


class EncodingError(UsageError):
    """A text that cannot be decoded, with the mistake and the remedy for a recipe's text."""

    def __init__(self, what: str, remedy: str):
        super().__init__(f"{what} {remedy}")
        self.what = what

    reason = "of another encoding, or damaged: name its encoding by text.encoding"
    """Why the file is left out of a folder or an archive."""


def _hold_places(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return PLACEHOLDER * (error.end - error.start), error.end


HOLD_PLACES = "lmlong.hold-places"
codecs.register_error(HOLD_PLACES, _hold_places)

Chunks = Callable[[], Iterator[bytes]]


def marked(beginning: bytes) -> str | None:
    """Return the encoding of a byte order mark in the first bytes of a text, or None."""
    return next((name for mark, name in MARKS.items() if beginning.startswith(mark)), None)


def find_encoding(chunks: Chunks, name: str, wanted: str) -> str:
    """Return the encoding of a text, in which all of it can be decoded: `wanted`, or for `auto` the encoding of its
    byte order mark, UTF-8, or windows-1252 if that is plausible. Raise EncodingError for any other text."""
    encoding = (marked(next(chunks(), b"")) or UTF8) if wanted == "auto" else wanted
    try:
        for _ in decode(chunks(), name, "strict", encoding):
            pass
        return encoding
    except EncodingError as error:
        cause = error.__context__
        if wanted != "auto" or encoding != UTF8 or not isinstance(cause, UnicodeDecodeError):
            raise
        if cause.reason != "unexpected end of data" and _is_western(chunks()):
            return WESTERN
        raise EncodingError(error.what, _remedy(chunks())) from None


def _is_western(chunks: Iterable[bytes]) -> bool:
    """Return whether a text that is not UTF-8 is plausibly windows-1252: all its bytes are characters, few of them are
    beyond ASCII, as in western European languages, and few form UTF-8 sequences, which suggest damaged UTF-8."""
    western, utf8 = codecs.getincrementaldecoder(WESTERN)(), codecs.getincrementaldecoder(UTF8)("ignore")
    size = beyond = sequences = 0
    for chunk in chunks:
        try:
            western.decode(chunk)
        except UnicodeDecodeError:
            return False
        if CONTROLS.search(chunk):
            return False
        sequences += len(utf8.decode(chunk).encode().translate(None, ASCII))
        size, beyond = size + len(chunk), beyond + len(chunk) - len(chunk.translate(None, BEYOND_ASCII))
    return sequences <= beyond / 4 and beyond <= size / 10


def _remedy(chunks: Iterable[bytes]) -> str:
    """Return the remedy for a text that is not UTF-8 and whose encoding was not detected."""
    utf8 = codecs.getincrementaldecoder(UTF8)("ignore")
    sequences = beyond = zeros = size = 0
    for chunk in chunks:
        sequences += len(utf8.decode(chunk).encode().translate(None, ASCII))
        beyond += len(chunk) - len(chunk.translate(None, BEYOND_ASCII))
        zeros, size = zeros + chunk.count(0), size + len(chunk)
    if sequences >= beyond / 2:
        return "It is damaged UTF-8: repair it, or set text.errors=replace to replace invalid bytes by U+FFFD."
    if zeros > size / 50:
        return "It may be UTF-16 without a byte order mark: set text.encoding=utf-16-le or utf-16-be, or leave it out."
    return "Name its encoding, such as text.encoding=windows-1251 or shift_jis, or leave it out."


def decode(chunks: Iterator[bytes], name: str, errors: str, encoding: str = UTF8) -> Iterator[tuple[str, int]]:
    """Yield pieces of text, each with the number of its invalid bytes, which were replaced."""
    if encoding in (UTF8, "utf-8-sig"):
        yield from _decode_utf8(chunks, name, errors, encoding == "utf-8-sig")
        return
    decoder = codecs.getincrementaldecoder(encoding)("strict" if errors == "strict" else HOLD_PLACES)
    offset = 0
    for chunk in chain(chunks, [b""]):  # the empty chunk marks the end
        try:
            text = decoder.decode(chunk, not chunk)
        except UnicodeDecodeError as error:
            position = max(0, offset - len(error.object) + len(chunk)) + error.start
            raise EncodingError(
                f"{name}: byte {position} is not {encoding} ({error.reason}).",
                "Repair the file, name another text.encoding, or set text.errors=replace to replace invalid bytes by "
                "U+FFFD.",
            ) from None
        offset += len(chunk)
        if text:
            yield text.replace(PLACEHOLDER, "\ufffd"), text.count(PLACEHOLDER)


def _decode_utf8(chunks: Iterator[bytes], name: str, errors: str, may_be_marked: bool) -> Iterator[tuple[str, int]]:
    rest, offset = b"", 0
    for chunk in chain(chunks, [b""]):
        data = rest + chunk
        if may_be_marked and chunk and len(data) < len(codecs.BOM_UTF8):
            rest = data
            continue
        if may_be_marked and data.startswith(codecs.BOM_UTF8):
            data, offset = data[len(codecs.BOM_UTF8) :], len(codecs.BOM_UTF8)
        may_be_marked = False
        try:
            text, used = codecs.utf_8_decode(data, errors, not chunk)
        except UnicodeDecodeError as error:
            raise EncodingError(
                f"{name}: byte {offset + error.start} is not UTF-8 ({error.reason}).",
                "Repair the file, name its encoding by text.encoding, or set text.errors=replace to replace invalid "
                "bytes by U+FFFD.",
            ) from None
        rest, offset = data[used:], offset + used
        if text:
            yield text, _replaced(data[:used], text)


def _replaced(data: bytes, text: str) -> int:
    """Return how many bytes of `data` were replaced by U+FFFD in `text`."""
    put_in = text.count("\ufffd") - data.count("\ufffd".encode())
    return len(data) - (len(text.encode()) - put_in * len("\ufffd".encode())) if put_in else 0
