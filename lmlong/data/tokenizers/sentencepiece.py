"""Lossless sentencepiece: train a model, and load any model so that it changes no text."""

import io
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

from lmlong import recipe
from lmlong.data.tokenizers.base import SubwordTokenizer
from lmlong.errors import UsageError
from lmlong.report.progress import waiting

SPACE = "\u2581"  # how sentencepiece writes a space inside its pieces

# Characters that sentencepiece changes or refuses, in runs: its space, the end of a C string, halves of pairs.
UNSAFE = re.compile(f"([{SPACE}\0\ud800-\udfff]+)")

# The trainer silently skips texts of more than 4,192 bytes; a character has at most four.
LINE = 1000

# sentencepiece drops texts that contain its sign for unknown characters; the others would be learned wrongly.
UNTRAINABLE = re.compile(f"[{SPACE}\u2585\0\ud800-\udfff]")

# Appended to a model, since protobuf merges a message that comes twice and the later value wins: a normalizer_spec (3)
# of 6 bytes, with precompiled_charsmap (2) empty, add_dummy_prefix (3) and remove_extra_whitespaces (4) false.
KEEP_TEXT = b"\x1a\x06\x12\x00\x18\x00\x20\x00"

PROBE = "  two  spaces\t\r\n\n e\u0301 \ufb01 \uff21 \U0001f600 <s></s><unk><0x41> end "


def train_sentencepiece(pieces: Iterable[str], options: recipe.Tokenizer) -> bytes:
    """Train a model on pieces of text; the same pieces give the same bytes."""
    texts = _without_rare([text for piece in pieces for text in lines(piece)], options.vocabulary)
    if not texts:
        raise UsageError("text.sources: no text to train a tokenizer on. Add text, or set text.tokenizer.kind=bytes.")
    model = io.BytesIO()
    _train(
        sentence_iterator=iter(texts),
        model_writer=model,
        model_type=options.algorithm,
        vocab_size=options.vocabulary,
        hard_vocab_limit=False,
        character_coverage=0.9995,
        required_chars=SPACE,  # never to be encoded as bytes, which could not be told from those of SPACE itself
        byte_fallback=True,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        # Pieces that cross words and lines raise Python's standard library from 3.4 to 4.3 bytes a token. Only bpe has
        # them across spaces: unigram would have so many candidates that training takes minutes.
        split_by_whitespace=options.algorithm == "unigram",
        split_by_unicode_script=False,
        allow_whitespace_only_pieces=True,
        max_sentencepiece_length=32,
        num_threads=2,  # the sums of unigram, and so its model, depend on it
        minloglevel=2,
    )
    size = SentencePieceProcessor(model_proto=model.getvalue()).vocab_size()
    if size < options.vocabulary:
        print(
            f"text.tokenizer.vocabulary: the text yields {size:,} pieces, not {options.vocabulary:,}; "
            "the smaller vocabulary is used.",
            file=sys.stderr,
        )
    return model.getvalue()


def _train(**options: Any) -> None:
    try:
        with waiting("training the tokenizer"):
            SentencePieceTrainer.train(**options)
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().removeprefix("INTERNAL: ").rstrip(".")
        raise UsageError(
            f"text.tokenizer: sentencepiece cannot train on this text ({reason}). Add text, change "
            "text.tokenizer.vocabulary or algorithm, or set text.tokenizer.kind=bytes."
        ) from error


def lines(text: str) -> Iterator[str]:
    """Cut a text into lines for the trainer, before newlines: it strips those at an end, but not those at a start."""
    text = UNTRAINABLE.sub("", text)
    start = 0
    while start < len(text):
        end = start + LINE
        if end < len(text):
            newline = text.rfind("\n", start + 1, end)
            end = newline if newline > 0 else end
        yield text[start:end]
        start = end


def _without_rare(texts: list[str], vocabulary: int) -> list[str]:
    """Cut texts at their rarer characters, which will be bytes; the others take half the vocabulary at most."""
    characters = Counter(chain.from_iterable(texts)).most_common()
    room = (vocabulary - 256 - 3) // 2
    if len(characters) <= room:
        return texts
    rare = re.compile(f"[{re.escape(''.join(character for character, _ in characters[room:]))}]+")
    return [part for text in texts for part in rare.split(text) if part]


class SentencePieceTokenizer(SubwordTokenizer):
    """Subwords of a sentencepiece model, with byte fallback."""

    unsafe = UNSAFE

    def __init__(self, model: bytes, name: str):
        """Raise a UsageError, which begins with `name`, for a model that cannot be made lossless."""
        self.processor, table, byte_tokens = _load(model, name)
        super().__init__(model, table, self.processor.bos_id(), self.processor.eos_id())
        self.byte_tokens = dict(enumerate(byte_tokens))

    def _encode_safe(self, text: str) -> list[int]:
        return self.processor.encode(text)

    def _encode_all_safe(self, texts: list[str]) -> list[list[int]]:
        return self.processor.encode(texts, num_threads=1)  # by default it takes all cores, which other processes use


def _load(model: bytes, name: str) -> tuple[SentencePieceProcessor, list[bytes], list[int]]:
    """Load a model so that it changes no text; raise a UsageError if that is impossible. Return also the bytes of each
    id, empty for control tokens, and the ids of the 256 bytes."""
    try:
        # An empty or a random file can be a valid message without content.
        processor = SentencePieceProcessor(model_proto=model + KEEP_TEXT)
        pieces = [_piece_bytes(processor, token) for token in range(processor.vocab_size())]
    except UnicodeDecodeError:
        raise UsageError(
            f"{name}: not a sentencepiece model, or damaged: a piece is not UTF-8. Use another model, or no path."
        ) from None
    except RuntimeError:
        pieces = []
    if not pieces:
        raise UsageError(f"{name}: not a sentencepiece model. Name a .model file as text.tokenizer.path, or none.")
    byte_tokens = [processor.piece_to_id(f"<0x{byte:02X}>") for byte in range(256)]
    if not all(map(processor.is_byte, byte_tokens)):
        raise UsageError(
            f"{name}: has no pieces for single bytes, so some text would be lost. "
            "Use a model trained with --byte_fallback=true, or leave out text.tokenizer.path."
        )
    if processor.bos_id() < 0 or processor.eos_id() < 0:
        raise UsageError(
            f"{name}: has no tokens for the begin and end of a document. "
            "Use a model with bos_id and eos_id, or leave out text.tokenizer.path."
        )
    if b"".join(pieces[token] for token in processor.encode(PROBE)) != PROBE.encode():
        raise UsageError(f"{name}: loses text, such as spaces or line ends. Use another model, or leave out the path.")
    return processor, pieces, byte_tokens


def _piece_bytes(processor: SentencePieceProcessor, token: int) -> bytes:
    piece = processor.id_to_piece(token)
    if processor.is_byte(token):
        return bytes([int(piece[3:5], 16)])
    if processor.is_control(token) or processor.is_unknown(token):
        return b""
    return piece.replace(SPACE, " ").encode()
