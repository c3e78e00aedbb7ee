"""Tokenizers from a tokenizer.json of the library `tokenizers`, loaded so that they change no text.

Two families are supported, since the bytes of their pieces are known: byte-level BPE, which writes bytes as visible
characters (GPT-2, Llama 3, SmolLM2), and pieces of characters with a symbol for the space and tokens for single bytes
(Llama 2, TinyLlama). Steps that would change a text are removed: normalization, and the space added before a text.
"""

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from lmlong.data.tokenizers.base import CannotEncode, SubwordTokenizer
from lmlong.data.tokenizers.huggingface_file import errors_named, parts_of, pieces_of, unwrapped
from lmlong.data.tokenizers.sentencepiece import SPACE
from lmlong.errors import UsageError, install_command

PROBE = "  two  spaces\t\r\n\n e\u0301 \ufb01 \uff21 \U0001f600 <s></s><unk><0x41> \u2581 12345 end "
NEVER = {0xC0, 0xC1, *range(0xF5, 0x100)}
"""Bytes that never occur in UTF-8."""
NEVER_WRITTEN = "\ufdd0"
"""A noncharacter of Unicode. It prefixes the names of special tokens in the vocabulary, so that no text matches
them."""
UNSAFE = f"\ud800-\udfff{NEVER_WRITTEN}"
"""Characters that are encoded byte by byte, since the library does not accept them."""
BYTE = "<0x[0-9A-F]{2}>"
"""The name of a byte token in a vocabulary of characters."""
VISIBLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
"""The bytes that GPT-2 writes as characters of the same numbers; the rest are written from U+0100 on."""

BYTE_OF = {chr(byte): byte for byte in VISIBLE} | {
    chr(256 + number): byte for number, byte in enumerate(sorted(set(range(256)) - set(VISIBLE)))
}


class HuggingFaceTokenizer(SubwordTokenizer):
    """A tokenizer.json in the form that `huggingface_file.wrapped` returns."""

    followers = ("a", "1", ".", "'s", " ", "\n", "\t")

    def __init__(self, file: bytes, name: str):
        with errors_named(name):
            saved = unwrapped(file)
            spec, pieces = saved["tokenizer"], pieces_of(saved["tokenizer"])
            of_bytes = _is_of_bytes(spec)
            table = _table(spec, pieces, of_bytes, saved["vocabulary"])
            self.special = _special(spec)
            self.byte_tokens = _byte_ids(pieces, self.special, of_bytes)
            self.specification = _without_special(lossless(spec))
            """The tokenizer.json by which it encodes."""
            self._encoder: Any = _library().Tokenizer.from_str(json.dumps(self.specification))
            numbers = {piece.removeprefix(NEVER_WRITTEN): token for piece, token in self._encoder.get_vocab().items()}
            if numbers != pieces:
                raise UsageError(
                    "the library `tokenizers` gives its pieces other ids than the file does. Use another tokenizer."
                )
            self.chat_template = saved.get("chat_template")
            self.unsafe = re.compile(_unsafe(spec, of_bytes))
            self.lost = sorted(set(range(256)) - NEVER - self.byte_tokens.keys())
            """Bytes without a token: characters that contain one are removed from a text."""
            self._lost_bytes = re.compile(b"[" + re.escape(bytes(self.lost)) + b"]") if self.lost else None
            super().__init__(file, table, saved["bos"], saved["eos"])
            if table[self.bos] or table[self.eos]:
                raise UsageError(
                    "the token that begins or ends a document also stands for text. Use another tokenizer."
                )
            probe = self.representable(PROBE)
            if self.decode_bytes(self.encode_part(probe)) != probe.encode():
                raise UsageError("loses text, such as spaces or line ends. Use another tokenizer.")

    def representable(self, text: str) -> str:
        if not self._lost_bytes or not self._lost_bytes.search(text.encode("utf-8", "surrogatepass")):
            return text
        return "".join(char for char in text if not self._lost_bytes.search(char.encode("utf-8", "surrogatepass")))

    def _encode_safe(self, text: str) -> list[int]:
        with _without_panic():
            return list(self._encoder.encode(text, add_special_tokens=False).ids)

    def _encode_all_safe(self, texts: list[str]) -> Iterator[list[int]]:
        with _one_thread(), _without_panic():  # without offsets, which take a third of the time of `encode`
            encodings = self._encoder.encode_batch_fast(texts, add_special_tokens=False)
        return (encoding.ids for encoding in encodings)


@contextmanager
def _without_panic() -> Iterator[None]:
    """Raise CannotEncode if the library panics, for example on a regular expression that takes too many steps. A panic
    is a BaseException, not an Exception."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise CannotEncode from error


@contextmanager
def _one_thread() -> Iterator[None]:
    """Keep the library on this thread: processes share the cores, and its thread pool does not survive a fork."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _library() -> Any:
    try:
        return import_module("tokenizers")
    except ImportError:
        raise UsageError(f"tokenizers is not installed. Run {install_command('import')}.") from None


def _is_of_bytes(spec: dict[str, Any]) -> bool:
    """Return whether a tokenizer.json is byte-level: its pieces are bytes written as visible characters."""
    parts = [*parts_of(spec.get("pre_tokenizer")), *parts_of(spec.get("decoder"))]
    return any(part["type"] == "ByteLevel" for part in parts)


def _special(spec: dict[str, Any]) -> dict[str, int]:
    """Return the ids of special tokens, which stand for no bytes, by name."""
    added = spec.get("added_tokens") or []
    return {token["content"]: token["id"] for token in added if token["special"] and token["content"]}


def _unsafe(spec: dict[str, Any], of_bytes: bool) -> str:
    """Return a pattern of the text that is encoded byte by byte. A unigram model would encode the name of a byte token,
    such as <0x41>, as that byte."""
    if of_bytes:
        return f"([{UNSAFE}]+)"
    return f"([{UNSAFE}{SPACE}]+)" if spec["model"]["type"] == "BPE" else f"([{UNSAFE}{SPACE}]+|{BYTE})"


def _table(spec: dict[str, Any], pieces: dict[str, int], of_bytes: bool, vocabulary: int | None) -> list[bytes]:
    """Return the bytes of each id, empty for special tokens and for ids without a piece."""
    most = max(pieces.values()) + 1
    if vocabulary is not None and most > vocabulary:
        raise UsageError(
            f"has {most:,} tokens, but the model has {vocabulary:,} embeddings. Use the tokenizer of this model."
        )
    table = [b""] * (vocabulary or most)
    added = {token["content"]: token for token in spec.get("added_tokens") or []}
    unknown = spec["model"].get("unk_token")
    for piece, token in pieces.items():
        if piece in added:
            table[token] = b"" if added[piece]["special"] else piece.encode()
        elif piece != unknown:
            table[token] = _bytes_of(piece, of_bytes)
    return table


def _bytes_of(piece: str, of_bytes: bool) -> bytes:
    if of_bytes:
        return bytes(BYTE_OF[character] for character in piece)
    if re.fullmatch(BYTE, piece):
        return bytes([int(piece[3:5], 16)])
    return piece.replace(SPACE, " ").encode()


def _byte_ids(pieces: dict[str, int], special: dict[str, int], of_bytes: bool) -> dict[int, int]:
    """Return the ids of single bytes. A vocabulary of characters must have all 256."""
    written = {byte: character for character, byte in BYTE_OF.items()}
    names = {byte: written[byte] if of_bytes else f"<0x{byte:02X}>" for byte in range(256)}
    if both := [name for name in names.values() if name in special]:
        raise UsageError(f"the special token {both[0]!r} is also that of a byte of text. Use another tokenizer.")
    tokens = {byte: pieces[name] for byte, name in names.items() if name in pieces}
    if len(tokens) < 256 and not of_bytes:
        raise UsageError("has no tokens for single bytes, so some text would be lost. Use another tokenizer.")
    return tokens


def lossless(spec: dict[str, Any]) -> dict[str, Any]:
    """Return a tokenizer.json without the steps that change, truncate or pad a text."""
    of_bytes = _is_of_bytes(spec)
    flags = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False)
    added = [{**token, **flags} for token in spec.get("added_tokens") or []]
    model = dict(spec["model"])
    if model["type"] == "BPE":
        special = _special(spec)
        merges = [merge for merge in model["merges"] if not _names(merge, special, of_bytes)]
        model |= {"dropout": None, "merges": merges}
    nothing = dict.fromkeys(("truncation", "padding", "post_processor"))
    changed = {
        "normalizer": None if of_bytes else _replace(" ", SPACE),
        "pre_tokenizer": _without_prefix(spec.get("pre_tokenizer")),
        "decoder": BYTE_LEVEL if of_bytes else OF_CHARACTERS,
    }
    return {**spec, **nothing, **changed, "model": model, "added_tokens": added}


def _replace(old: str, new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
OF_CHARACTERS = {"type": "Sequence", "decoders": [_replace(SPACE, " "), {"type": "ByteFallback"}, {"type": "Fuse"}]}
"""Decoders of byte-level pieces and of pieces of characters."""


def _without_special(spec: dict[str, Any]) -> dict[str, Any]:
    """Return a tokenizer.json that encodes the name of a special token in a text as ordinary text."""
    special = _special(spec)
    added = [token for token in spec["added_tokens"] if not token["special"]]
    model = {**spec["model"], "vocab": _renamed(spec["model"]["vocab"], special)}
    if model["type"] == "BPE":
        model["unk_token"] = _hidden(model.get("unk_token"), special)
    return {**spec, "model": model, "added_tokens": added}


def _renamed(vocabulary: Any, special: dict[str, int]) -> Any:
    """Return the vocabulary of a model with special tokens renamed, so that `<s>` in a text does not match one."""
    if isinstance(vocabulary, list):
        return [[_hidden(piece, special), score] for piece, score in vocabulary]
    renamed = {_hidden(piece, special): token for piece, token in vocabulary.items()}
    return renamed | {_hidden(name, special): token for name, token in special.items()}


def _hidden(piece: Any, special: dict[str, int]) -> Any:
    return NEVER_WRITTEN + piece if piece in special else piece


def _names(merge: str | list[str], special: dict[str, int], of_bytes: bool) -> bool:
    """Return whether a merge produces or uses the name of a special token, or of a byte token among characters."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return any(
        piece in special or (not of_bytes and re.fullmatch(BYTE, piece)) for piece in (left, right, left + right)
    )


def _without_prefix(part: Any) -> Any:
    """Return a pre-tokenizer that adds no space before a text."""
    if not isinstance(part, dict):
        return part
    changed = dict(part)
    if "pretokenizers" in part:
        changed["pretokenizers"] = [_without_prefix(inner) for inner in part["pretokenizers"]]
    if part.get("type") == "ByteLevel":
        changed["add_prefix_space"] = False
    if part.get("type") == "Metaspace":
        changed["prepend_scheme"] = "never"
        changed.pop("add_prefix_space", None)
    return changed
