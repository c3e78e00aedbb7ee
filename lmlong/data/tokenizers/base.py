"""The base class of tokenizers, which lose no text: decode(encode(text)) == text for every Python string.

Each token stands for bytes, and decoding is a table lookup, so streams and byte counts are exact.
"""

import codecs
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from hashlib import sha256
from itertools import compress
from pathlib import Path

import numpy as np

from lmlong.data.document import Document
from lmlong.data.tokenizers.boundaries import TokenBoundaries
from lmlong.errors import UsageError
from lmlong.io.system_errors import explain_errors

BYTES_FILE = b"lmlong bytes tokenizer: 0-255 are bytes, 256 begins a document, 257 ends it\n"

PART = 8192
"""Long texts are encoded in parts. A part ends before the first newline after PART characters, or after twice as many,
so that the tokens of a text do not depend on how it is streamed."""


def _keep_surrogates(error: UnicodeError) -> tuple[str, int]:
    """Decode a lone surrogate as `surrogatepass` does, and every other broken byte as U+FFFD."""
    assert isinstance(error, UnicodeDecodeError)
    try:
        return error.object[error.start : error.start + 3].decode("utf-8", "surrogatepass")[0], error.start + 3
    except UnicodeDecodeError:
        return "\ufffd", error.end


LOSSLESS = "lmlong.lossless"
codecs.register_error(LOSSLESS, _keep_surrogates)


class CannotEncode(UsageError):
    """A text on which the library of a tokenizer failed."""

    def __init__(self) -> None:
        super().__init__("The tokenizer of this model cannot encode this text. Use other text, or another model.")


class Tokenizer(ABC):
    """Ids that stand for bytes, and bos and eos, which begin and end a document."""

    followers: Sequence[str] = ()
    """One character of each class that decides where the pre-tokenizer cuts a text; empty without a pre-tokenizer."""
    special: Mapping[str, int] = {}
    """Tokens that stand for no bytes, by their names in a chat template."""
    chat_template: str | None = None
    """The Jinja template that turns messages into text; None unless the model was trained for chat."""

    def __init__(self, file: bytes, table: list[bytes], bos: int, eos: int):
        self.vocabulary = len(table)
        self.bos = bos
        self.eos = eos
        self.token_bytes = np.array([len(data) for data in table], dtype=np.int64)
        self.hash = sha256(file).hexdigest()
        self.file = file
        self._table = table

    @abstractmethod
    def encode_part(self, text: str) -> list[int]:
        """Return the ids of a text of one part or less."""

    def encode_parts(self, texts: list[str]) -> Iterable[Sequence[int]]:
        """Return the ids of each of several texts of one part or less."""
        return map(self.encode_part, texts)

    def representable(self, text: str) -> str:
        """Return a text without the characters that the tokenizer cannot represent."""
        return text

    def count_replaced(self, text: str, document: Document) -> int:
        """Return how many characters of a piece of a document are replaced; raise a UsageError if one must not be."""
        return 0

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text. bos and eos are not added, and no text encodes to them."""
        return [token for part in parts([text]) for token in self.encode_part(part)]

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of any ids; invalid UTF-8 becomes U+FFFD."""
        return self.decode_bytes(tokens).decode("utf-8", LOSSLESS)

    def decode_bytes(self, tokens: Iterable[int]) -> bytes:
        """Return the bytes of ids, which may end within a character."""
        return b"".join(self._table[token] for token in tokens)

    @cached_property
    def boundaries(self) -> TokenBoundaries:
        """The tokens at the end of a text that following text may change."""
        return TokenBoundaries(self._table, self.encode_part, self.followers)

    def stream(self) -> "TextStream":
        """Return an incremental decoder."""
        return TextStream(self._table)

    def save(self, path: Path | str) -> None:
        """Write the tokenizer to a file for `load_tokenizer`."""
        with explain_errors(Path(path)):
            Path(path).write_bytes(self.file)


class SubwordTokenizer(Tokenizer):
    """A tokenizer of a library. Text that the library would change, or does not accept, is encoded byte by byte."""

    unsafe: re.Pattern[str]
    """Matches such text, in one group."""
    byte_tokens: Mapping[int, int]
    """The tokens of single bytes."""

    @abstractmethod
    def _encode_safe(self, text: str) -> list[int]:
        """Return the ids of a text without unsafe characters."""

    @abstractmethod
    def _encode_all_safe(self, texts: list[str]) -> Iterable[list[int]]:
        """Return the ids of each of several such texts."""

    def encode_part(self, text: str) -> list[int]:
        tokens: list[int] = []
        for number, run in enumerate(self.unsafe.split(self.representable(text))):
            if number % 2:
                tokens.extend(self.byte_tokens[byte] for byte in run.encode("utf-8", "surrogatepass"))
            elif run:
                tokens.extend(self._encode_safe(run))
        return tokens

    def encode_parts(self, texts: list[str]) -> list[list[int]]:
        texts = [self.representable(text) for text in texts]
        is_safe = [not self.unsafe.search(text) for text in texts]
        encoded = iter(self._encode_all_safe(list(compress(texts, is_safe))) if any(is_safe) else ())
        return [next(encoded) if safe else self.encode_part(text) for text, safe in zip(texts, is_safe, strict=True)]


class ByteTokenizer(Tokenizer):
    """One token for each byte of UTF-8."""

    def __init__(self) -> None:
        super().__init__(BYTES_FILE, [bytes([byte]) for byte in range(256)] + [b"", b""], bos=256, eos=257)

    def encode_part(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "surrogatepass"))

    def encode_parts(self, texts: list[str]) -> Iterable[Sequence[int]]:
        return (text.encode("utf-8", "surrogatepass") for text in texts)


class TextStream:
    """An incremental decoder that holds back the bytes of an incomplete character."""

    def __init__(self, table: Sequence[bytes]):
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")(LOSSLESS)

    def feed(self, token: int, skip: int = 0) -> str:
        """Return the characters that this token completes, without its first `skip` bytes."""
        return self._decoder.decode(self._table[token][skip:])

    def finish(self) -> str:
        """Return U+FFFD if the text ends within a character, otherwise an empty string."""
        return self._decoder.decode(b"", final=True)


def parts(pieces: Iterable[str]) -> Iterator[str]:
    """Cut a text into parts that are encoded separately; the cuts depend only on its content."""
    rest = ""
    for piece in pieces:
        rest += piece
        start = 0
        while len(rest) - start > 2 * PART:
            end = _cut(rest, start)
            yield rest[start:end]
            start = end
        rest = rest[start:]
    while rest:
        end = _cut(rest, 0)
        yield rest[:end]
        rest = rest[end:]


def _cut(text: str, start: int) -> int:
    """Return the end of the part that begins at `start`."""
    newline = text.find("\n", start + PART, start + 2 * PART)
    return newline if newline >= 0 else min(start + 2 * PART, len(text))
