"""The tokenizer of a recipe: read from a file, or trained on a sample of the training text, once, and cached."""

from collections.abc import Iterable, Iterator

from lmlong import recipe
from lmlong.data.document import Skipped
from lmlong.data.duplicates import Duplicates, divided, split_key
from lmlong.data.sources import Source, check_sources, size_of
from lmlong.data.split import Part
from lmlong.data.tokenizers import load_tokenizer, train_tokenizer
from lmlong.data.tokenizers.base import Tokenizer
from lmlong.data.tokenizers.sentencepiece import lines
from lmlong.io.cache import cache_folder, fetch, key_of
from lmlong.io.folder_manifest import Format
from lmlong.report.progress import Progress

FORMAT = Format("tokenizer", 2)  # also raised when the same text and options give another tokenizer


def tokenizer_of(sources: list[Source], options: recipe.Tokenizer, duplicates: Duplicates = "keep") -> Tokenizer:
    """Return the tokenizer of a recipe, from its file, from the cache, or trained now."""
    if not options.trained:
        return train_tokenizer([], options)
    weights = [source.weight for source in sources]
    folder = fetch(
        cache_folder() / "tokenizers" / key_of(FORMAT, options.model_dump(), weights, *split_key(sources, duplicates)),
        FORMAT,
        lambda temporary: _train(sources, options, duplicates).save(temporary / "tokenizer.model"),
        check=lambda folder: load_tokenizer(folder / "tokenizer.model"),
    )
    return load_tokenizer(folder / "tokenizer.model")


def _train(sources: list[Source], options: recipe.Tokenizer, duplicates: Duplicates) -> Tokenizer:
    """Train on a sample of the training text, to which each source contributes by its weight."""
    check_sources(sources)
    weights = sum(source.weight for source in sources)
    texts: list[str] = []
    # those to validate on come last, and are not read
    sampled = [source for source in sources if int(options.sample_bytes * source.weight / weights)]
    with Progress("sample for the tokenizer", size_of(sampled)) as progress:
        for source, parts in zip(sources, divided(sources, duplicates), strict=True):
            budget = int(options.sample_bytes * source.weight / weights)
            if budget:
                texts += sample(_training_lines(parts, 4 * budget if source.remote else None, progress), budget)
    return train_tokenizer(texts, options)


def _training_lines(parts: Iterable[Part | Skipped], limit: int | None, progress: Progress) -> Iterator[str]:
    """Yield the lines of the training text, or only of its beginning if there is a limit: an even sample would download
    a remote source twice."""
    pieces: Iterator[str] = (
        piece for part in parts if isinstance(part, Part) and part.split == "train" for piece in part.pieces()
    )
    if limit is not None:
        pieces = head(pieces, limit)
    for piece in pieces:
        progress.update(len(piece))
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
