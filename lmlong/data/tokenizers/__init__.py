"""Tokenizers: bytes, characters of an alphabet, sentencepiece models, and tokenizer.json files."""

from collections.abc import Iterable
from pathlib import Path

from lmlong import recipe
from lmlong.data.tokenizers import characters, huggingface_file
from lmlong.data.tokenizers.base import BYTES_FILE, ByteTokenizer, Tokenizer
from lmlong.data.tokenizers.huggingface import HuggingFaceTokenizer
from lmlong.data.tokenizers.sentencepiece import SentencePieceTokenizer, train_sentencepiece
from lmlong.errors import UsageError
from lmlong.io.files import read_ordinary


def load_tokenizer(path: Path | str) -> Tokenizer:
    """Load a tokenizer from a file that `Tokenizer.save` wrote, a sentencepiece .model or a tokenizer.json.

    A UsageError names the file if it cannot be read without losing text.
    """
    try:
        file = read_ordinary(Path(path))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}). Name the file of a tokenizer.") from None
    if file == BYTES_FILE:
        return ByteTokenizer()
    if file.startswith(characters.SIGNATURE):
        return characters.load_characters(file, str(path))
    if file.lstrip()[:1] == b"{":
        return HuggingFaceTokenizer(huggingface_file.read_tokenizer_json(Path(path)), str(path))
    return SentencePieceTokenizer(file, str(path))


def train_tokenizer(pieces: Iterable[str], options: recipe.Tokenizer) -> Tokenizer:
    """Return the tokenizer of a recipe, trained on pieces of text if its kind is trained."""
    if options.kind == "bytes":
        return ByteTokenizer()
    if options.kind == "characters":
        assert options.alphabet is not None, "the recipe asks for it"
        return characters.CharacterTokenizer(options.alphabet, options.unknown)
    if options.path is not None:
        return load_tokenizer(options.path)
    return SentencePieceTokenizer(train_sentencepiece(pieces, options), "the tokenizer just trained")
