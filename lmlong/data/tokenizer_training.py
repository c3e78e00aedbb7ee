"""The tokenizer of a recipe: read from a file, or trained on a sample of the training text, once, and cached."""

from collections.abc import Iterable, Iterator

from tqdm import tqdm

from lmlong import recipe
from lmlong.data import tokenizer as tokenizers
from lmlong.data.sentencepiece_model import lines
from lmlong.data.sources import Input, check
from lmlong.data.split import Part, split
from lmlong.data.tokenizer import Tokenizer
from lmlong.io.cache import cache_folder, fetch, key_of
from lmlong.io.manifest import Format

FORMAT = Format("tokenizer", 1)  # also raised when the same text and options give another tokenizer


def tokenizer_of(inputs: list[Input], options: recipe.Tokenizer) -> Tokenizer:
    """Return the tokenizer of a recipe, from its file, from the cache, or trained now."""
    if not options.trained:
        return tokenizers.train([], options)
    content = [(entry.source.fingerprint, entry.weight, entry.held_out) for entry in inputs]
    folder = fetch(
        cache_folder() / "tokenizers" / key_of(FORMAT, options.model_dump(), content),
        FORMAT,
        lambda temporary: _train(inputs, options).save(temporary / "tokenizer.model"),
    )
    return tokenizers.load(folder / "tokenizer.model")


def _train(inputs: list[Input], options: recipe.Tokenizer) -> Tokenizer:
    """Train on a sample of the training text, to which each source contributes by its weight."""
    check(inputs)
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
    if entry.source.remote:  # only its beginning: an even sample would cost a second download of everything
        pieces = head(pieces, 4 * budget)
    for piece in pieces:
        bar.update(len(piece))
        yield from lines(piece)


def sample(texts: Iterable[str], budget: int) -> list[str]:
    """Return at most `budget` bytes of texts, evenly spread over a stream of unknown length."""
    kept: list[str] = []
    size, stride = 0, 1
    for number, text in enumerate(texts):
        if number % stride:
            continue
        kept.append(text)
        size += _bytes(text)
        if size > 2 * budget:
            kept, stride = kept[::2], 2 * stride
            size = sum(map(_bytes, kept))
    return _thin(kept, size, budget)


def head(texts: Iterable[str], budget: int) -> Iterator[str]:
    """Iterate over the first texts, up to `budget` bytes."""
    for text in texts:
        budget -= _bytes(text)
        if budget < 0:
            return
        yield text


def _thin(texts: list[str], size: int, budget: int) -> list[str]:
    if size <= budget:
        return texts
    share = budget / size
    even = [text for number, text in enumerate(texts) if int((number + 1) * share) > int(number * share)]
    return list(head(even, budget))


def _bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))
