"""Detect the encoding of plain text by its byte order mark, or by decoding all of it strictly."""

import codecs
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import NamedTuple

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
NOT_WESTERN = re.compile(rb"[\0-\x08\x0e-\x19\x1c-\x1f\x7f\x81\x8d\x8f\x90\x9d]")
"""Control characters, and the bytes that windows-1252 does not define."""

PLACEHOLDER, CONTINUED = "\udc80", "\udc81"
"""Lone surrogates, which valid text does not contain. They stand for invalid bytes, so that they can be counted:
PLACEHOLDER becomes U+FFFD, and CONTINUED, for a further byte of the same invalid sequence, nothing."""


class EncodingError(UsageError):
    """A text that cannot be decoded: its first invalid byte, and the remedy."""

    def __init__(self, name: str, byte: int, encoding: str, why: str, remedy: str):
        super().__init__(f"{name}: byte {byte} is not {encoding} ({why}). {remedy}")
        self.name, self.byte, self.encoding, self.why = name, byte, encoding, why

    def with_remedy(self, remedy: str) -> "EncodingError":
        return EncodingError(self.name, self.byte, self.encoding, self.why, remedy)

    reason = "of another encoding, or damaged: name its encoding by text.encoding"
    """Why the file is left out of a folder or an archive."""


def _hold_places(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return PLACEHOLDER * (error.end - error.start), error.end


def _hold_sequence(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return PLACEHOLDER + CONTINUED * (error.end - error.start - 1), error.end


HOLD_PLACES, HOLD_SEQUENCES = "lmlong.hold-places", "lmlong.hold-sequences"
codecs.register_error(HOLD_PLACES, _hold_places)
codecs.register_error(HOLD_SEQUENCES, _hold_sequence)

Chunks = Callable[[], Iterator[bytes]]


def marked(beginning: bytes) -> str | None:
    """Return the encoding of a byte order mark in the first bytes of a text, or None."""
    return next((name for mark, name in MARKS.items() if beginning.startswith(mark)), None)


def find_encoding(chunks: Chunks, name: str, requested: str) -> str:
    """Return the encoding of a text, in which all of it can be decoded: `requested`, or for `auto` the encoding of its
    byte order mark, UTF-8, or windows-1252 if that is plausible. Raise EncodingError for any other text."""
    encoding = (marked(next(chunks(), b"")) or UTF8) if requested == "auto" else requested
    try:
        for _ in decode(chunks(), name, "strict", encoding):
            pass
        return encoding
    except EncodingError as error:
        if requested != "auto" or encoding != UTF8:
            raise
        is_western, remedy = _assess(chunks())
        if is_western and error.why != "unexpected end of data":
            return WESTERN
        raise error.with_remedy(remedy) from None


def _assess(chunks: Iterable[bytes]) -> tuple[bool, str]:
    """Return whether a text that is not UTF-8 is plausibly windows-1252, and the remedy if it is not.

    It is plausible if all bytes are characters, few of them are beyond ASCII, as in western European languages, and few
    form UTF-8 sequences, which suggest damaged UTF-8.
    """
    utf8 = codecs.getincrementaldecoder(UTF8)("ignore")
    size = beyond = zeros = in_sequences = 0
    all_defined = True
    for chunk in chunks:
        size += len(chunk)
        beyond += len(chunk) - len(chunk.translate(None, BEYOND_ASCII))
        zeros += chunk.count(0)
        in_sequences += len(utf8.decode(chunk).encode().translate(None, ASCII))
        all_defined = all_defined and not NOT_WESTERN.search(chunk)
    is_western = all_defined and in_sequences <= beyond / 4 and beyond <= size / 10
    if in_sequences >= beyond / 2:
        return is_western, (
            "It is damaged UTF-8: repair it, or set text.errors=replace to replace invalid bytes by U+FFFD."
        )
    if zeros > size / 50:
        return is_western, (
            "It may be UTF-16 without a byte order mark: set text.encoding=utf-16-le or utf-16-be, or leave it out."
        )
    return is_western, "Name its encoding, such as text.encoding=windows-1251 or shift_jis, or leave it out."


class Piece(NamedTuple):
    """A piece of a text, in which invalid bytes are replaced by U+FFFD: one for each invalid sequence of UTF-8, and for
    each invalid byte in another encoding."""

    text: str
    invalid_bytes: int
    replacements: int


def decode(chunks: Iterator[bytes], name: str, errors: str, encoding: str = UTF8) -> Iterator[Piece]:
    """Yield a text in non-empty pieces. Raise EncodingError for the first invalid byte if `errors` is strict."""
    is_utf8 = encoding in (UTF8, "utf-8-sig")
    replace = HOLD_SEQUENCES if is_utf8 else HOLD_PLACES
    decoder = codecs.getincrementaldecoder(UTF8 if is_utf8 else encoding)("strict" if errors == "strict" else replace)
    offset, mark = 0, "\ufeff" if encoding == "utf-8-sig" else ""
    for chunk in chain(chunks, [b""]):  # the empty chunk marks the end
        try:
            text = decoder.decode(chunk, not chunk)
        except UnicodeDecodeError as error:
            position = max(0, offset - len(error.object) + len(chunk)) + error.start
            remedy = (
                "Repair the file, set another text.encoding, or set text.errors=replace to replace invalid bytes by"
            )
            shown = "UTF-8" if is_utf8 else encoding
            raise EncodingError(name, position, shown, error.reason, f"{remedy} U+FFFD.") from None
        offset += len(chunk)
        if text:
            replacements, continued = text.count(PLACEHOLDER), text.count(CONTINUED)
            text = text.removeprefix(mark).replace(PLACEHOLDER, "\ufffd").replace(CONTINUED, "")
            mark = ""
        if text:
            yield Piece(text, replacements + continued, replacements)
