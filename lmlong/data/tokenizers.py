"""The tokenizer of a file or of a recipe, whatever its kind."""

from collections.abc import Iterable
from pathlib import Path

from lmlong import recipe
from lmlong.data import character_tokenizer, huggingface_file, sentencepiece_model
from lmlong.data.character_tokenizer import CharacterTokenizer
from lmlong.data.huggingface_tokenizer import HuggingFaceTokenizer
from lmlong.data.tokenizer import BYTES_FILE, ByteTokenizer, SentencePieceTokenizer, Tokenizer
from lmlong.errors import UsageError
from lmlong.io.files import read_ordinary


def load(path: Path | str) -> Tokenizer:
    """Load a tokenizer from a file written by `save`, or from any sentencepiece .model or tokenizer.json that can be
    made lossless."""
    try:
        file = read_ordinary(Path(path))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}). A tokenizer is a file.") from None
    if file == BYTES_FILE:
        return ByteTokenizer()
    if file.startswith(b"lmlong characters"):
        return character_tokenizer.load(file, str(path))
    if file.lstrip()[:1] == b"{":
        return HuggingFaceTokenizer(huggingface_file.read(Path(path)), str(path))
    return SentencePieceTokenizer(file, str(path))


def train(pieces: Iterable[str], options: recipe.Tokenizer) -> Tokenizer:
    """Return the tokenizer of a recipe, trained on these pieces of text unless there is nothing to train."""
    if options.kind == "bytes":
        return ByteTokenizer()
    if options.kind == "characters":
        assert options.alphabet is not None, "the recipe asks for it"
        return CharacterTokenizer(options.alphabet, options.unknown)
    if options.path is not None:
        return load(options.path)
    return SentencePieceTokenizer(sentencepiece_model.train(pieces, options), "the tokenizer just trained")
