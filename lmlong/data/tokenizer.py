"""Text <-> token ids without loss: decode(encode(text)) == text for every Python string.

In every tokenizer a token stands for bytes; decoding is a table of them, so streams and byte counts are exact.
"""

import codecs
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from hashlib import sha256
from itertools import compress
from pathlib import Path

import numpy as np

from lmlong.data import sentencepiece_model
from lmlong.data.token_boundaries import TokenBoundaries
from lmlong.errors import UsageError
from lmlong.io.system_errors import explain_errors

BYTES_FILE = b"lmlong bytes tokenizer: 0-255 are bytes, 256 begins a document, 257 ends it\n"

# Long texts are encoded in parts. A part ends before the first newline past PART characters, or after twice as many, so
# that the same text gives the same tokens however it arrives.
PART = 8192


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
    """A text that a tokenizer has no tokens for, since its library failed on it."""

    def __init__(self) -> None:
        super().__init__("The tokenizer of this model cannot encode this text. Use other text, or another model.")


class Tokenizer(ABC):
    """A tokenizer: ids that stand for bytes, and bos and eos, which stand for the ends of a document."""

    followers: Sequence[str] = ()
    """Characters of each sort on which it depends where a text is cut before pieces are joined, if it is."""
    special: Mapping[str, int] = {}
    """Tokens that stand for no bytes, by the names that a chat template has for them."""
    chat_template: str | None = None
    """How messages become text, as a template of Jinja, where the model was made for chat."""

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
        """Return the ids of a text short enough to be encoded at once."""

    def encode_parts(self, texts: list[str]) -> Iterable[Sequence[int]]:
        """Return the ids of each of several texts, each short enough to be encoded at once."""
        return map(self.encode_part, texts)

    def representable(self, text: str) -> str:
        """Return a text without the characters that the tokenizer has no tokens for, if there are any."""
        return text

    def encode_pieces(self, pieces: Iterable[str]) -> Iterator[np.ndarray]:
        """Iterate over the ids of a text that comes in pieces, as int64 arrays; how it is cut makes no difference."""
        for part in parts(pieces):
            yield np.array(self.encode_part(part), dtype=np.int64)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; bos and eos are not added, and nothing in the text encodes to them."""
        return [token for part in parts([text]) for token in self.encode_part(part)]

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of any ids; bytes that are no character become U+FFFD."""
        return self.decode_bytes(tokens).decode("utf-8", LOSSLESS)

    def decode_bytes(self, tokens: Iterable[int]) -> bytes:
        """Return the bytes of ids, whether or not they are whole characters."""
        return b"".join(self._table[token] for token in tokens)

    @cached_property
    def boundaries(self) -> TokenBoundaries:
        """What is known of the tokens at the end of a text before it is known what follows."""
        return TokenBoundaries(self._table, self.encode_part, self.followers)

    def stream(self) -> "TextStream":
        """Return a decoder for tokens that come one by one."""
        return TextStream(self._table)

    def save(self, path: Path | str) -> None:
        """Write the tokenizer to a file for `load`."""
        with explain_errors(Path(path)):
            Path(path).write_bytes(self.file)


class SentencePieceTokenizer(Tokenizer):
    """Subwords of a sentencepiece model, with byte fallback."""

    def __init__(self, model: bytes, name: str):
        self.processor = sentencepiece_model.processor(model, name)
        table = sentencepiece_model.table(self.processor)
        super().__init__(model, table, self.processor.bos_id(), self.processor.eos_id())
        self._bytes = sentencepiece_model.byte_ids(self.processor)

    def encode_part(self, text: str) -> list[int]:
        tokens: list[int] = []
        for number, run in enumerate(sentencepiece_model.UNSAFE.split(text)):
            if number % 2:
                tokens.extend(self._bytes[byte] for byte in run.encode("utf-8", "surrogatepass"))
            elif run:
                tokens.extend(self.processor.encode(run))
        return tokens

    def encode_parts(self, texts: list[str]) -> list[list[int]]:
        safe = [not sentencepiece_model.UNSAFE.search(text) for text in texts]
        # all at once; by default the library would take all cores, which other processes have
        encoded = iter(self.processor.encode(list(compress(texts, safe)), num_threads=1) if any(safe) else ())
        return [next(encoded) if one else self.encode_part(text) for text, one in zip(texts, safe, strict=True)]


class ByteTokenizer(Tokenizer):
    """One token for each byte of UTF-8."""

    def __init__(self) -> None:
        super().__init__(BYTES_FILE, [bytes([byte]) for byte in range(256)] + [b"", b""], bos=256, eos=257)

    def encode_part(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "surrogatepass"))

    def encode_parts(self, texts: list[str]) -> Iterable[Sequence[int]]:
        return (text.encode("utf-8", "surrogatepass") for text in texts)


class TextStream:
    """An incremental decoder, which holds back the bytes of an incomplete character."""

    def __init__(self, table: Sequence[bytes]):
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")(LOSSLESS)

    def feed(self, token: int, skip: int = 0) -> str:
        """Return the characters that this token completes, without its first `skip` bytes."""
        return self._decoder.decode(self._table[token][skip:])

    def finish(self) -> str:
        """Return U+FFFD for an incomplete character at the end, or nothing."""
        return self._decoder.decode(b"", final=True)


def parts(pieces: Iterable[str]) -> Iterator[str]:
    """Cut a text into parts, each to be encoded at once, that depend on nothing but its content."""
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
