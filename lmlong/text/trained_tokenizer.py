"""The tokenizer a recipe asks for: read from a file, or trained on a sample of the training text, once, and cached."""

from collections.abc import Iterator

from tqdm import tqdm

from lmlong import recipe
from lmlong.io.cache import cache_folder, fetch, key_of
from lmlong.io.manifest import Format
from lmlong.text import tokenizer as tokenizers
from lmlong.text.inputs import Input
from lmlong.text.sampling import head, sample
from lmlong.text.sentencepiece_model import lines
from lmlong.text.split import Part, split
from lmlong.text.tokenizer import Tokenizer

FORMAT = Format("tokenizer", 1)  # raised too when the same text and options come to give another one


def tokenizer_of(inputs: list[Input], options: recipe.Tokenizer) -> Tokenizer:
    """The tokenizer of a recipe, from its file, from the cache, or trained now."""
    if options.kind == "bytes" or options.path is not None:
        return tokenizers.train([], options)
    content = [(entry.source.fingerprint, entry.weight, entry.held_out) for entry in inputs]
    folder = fetch(
        cache_folder() / "tokenizers" / key_of(FORMAT, options.model_dump(), content),
        FORMAT,
        lambda temporary: _train(inputs, options).save(temporary / "tokenizer.model"),
    )
    return tokenizers.load(folder / "tokenizer.model")


def _train(inputs: list[Input], options: recipe.Tokenizer) -> Tokenizer:
    """Train on a sample of the training text, to which each source adds by its weight."""
    total = sum(entry.weight for entry in inputs)
    texts: list[str] = []
    with tqdm(desc="sample for the tokenizer", unit="B", unit_scale=True, disable=None) as bar:
        for entry in inputs:
            budget = int(options.sample_bytes * entry.weight / total)
            if budget:
                texts += sample(_training_lines(entry, budget, bar), budget)
    return tokenizers.train(texts, options)


def _training_lines(entry: Input, budget: int, bar: tqdm) -> Iterator[str]:
    pieces: Iterator[str] = (
        piece
        for part in split(entry.source.documents(), entry.held_out)
        if isinstance(part, Part) and part.split == "train"
        for piece in part.pieces()
    )
    if entry.source.remote:  # its beginning must do: an even sample would cost a second download of everything
        pieces = head(pieces, 4 * budget)
    for piece in pieces:
        bar.update(len(piece))
        yield from lines(piece)
