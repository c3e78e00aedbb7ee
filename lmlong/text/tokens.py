"""Documents -> token files in the cache, made once for each content of the sources and each tokenizer.

A folder of the cache holds tokenizer.model, info.json, validation.tokens, train-0.tokens and so on, one for each
training source, and beside each token file the places where its documents begin.
"""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from lmlong import recipe
from lmlong.errors import UsageError
from lmlong.text import tokenizer as tokenizers
from lmlong.text.cache import build, cache_folder
from lmlong.text.corpus import Source, open_source
from lmlong.text.reading import Skipped
from lmlong.text.sampling import head, sample
from lmlong.text.sentencepiece_model import lines
from lmlong.text.split import Part, split
from lmlong.text.token_file import Count, TokenFile, TokenWriter, read_tokens
from lmlong.text.tokenizer import Tokenizer

FORMAT = 1  # part of the key: raised when the files, or how text becomes tokens, change


class Tokens(NamedTuple):
    """Everything about the text that training needs."""

    folder: Path
    tokenizer: Tokenizer
    train: list[TokenFile]  # one for each source
    weights: list[float]  # of the sources
    validation: TokenFile
    info: dict[str, Any]  # what was read, skipped and written


class _Input(NamedTuple):
    source: Source
    weight: float
    held_out: float  # share of its text that validates


def prepare(text: recipe.Text, tokenizer: Tokenizer | None = None) -> Tokens:
    """The tokens of a recipe's text, from the cache or made now; `tokenizer` takes the place of the recipe's."""
    inputs = _inputs(text)
    folder = cache_folder() / "tokens" / _key(inputs, text, tokenizer)
    if not folder.is_dir():
        chosen = tokenizer or _train_tokenizer(inputs, text.tokenizer)
        build(folder, lambda temporary: _write(temporary, inputs, chosen))
    tokens = _open(folder, [options.weight for options in text.sources])
    _check(tokens, text)
    return tokens


def train_tokenizer(text: recipe.Text) -> Tokenizer:
    """The tokenizer that a recipe's training text and options give."""
    return _train_tokenizer(_inputs(text), text.tokenizer)


def _inputs(text: recipe.Text) -> list[_Input]:
    """The sources to train on, then those to validate on."""
    held_out = 0.0 if text.validation.sources else text.validation.fraction
    inputs = [_Input(open_source(options, text.errors), options.weight, held_out) for options in text.sources]
    return inputs + [_Input(open_source(options, text.errors), 0.0, 1.0) for options in text.validation.sources]


def _key(inputs: list[_Input], text: recipe.Text, tokenizer: Tokenizer | None) -> str:
    """A hash of whatever the token files depend on."""
    options: Any = text.tokenizer.model_dump()
    if tokenizer is not None:
        options = tokenizer.hash
    elif text.tokenizer.path is not None or text.tokenizer.kind == "bytes":
        options = tokenizers.train([], text.tokenizer).hash
    else:
        options["weights"] = [entry.weight for entry in inputs]
    content = [FORMAT, text.errors, options, [(entry.source.fingerprint, entry.held_out) for entry in inputs]]
    return sha256(json.dumps(content).encode()).hexdigest()[:32]


def _train_tokenizer(inputs: list[_Input], options: recipe.Tokenizer) -> Tokenizer:
    """The recipe's tokenizer, trained on a sample of the training text, to which each source adds by its weight."""
    if options.kind == "bytes" or options.path is not None:
        return tokenizers.train([], options)
    total = sum(entry.weight for entry in inputs)
    texts: list[str] = []
    with tqdm(desc="sample for the tokenizer", unit="B", unit_scale=True, disable=None) as bar:
        for entry in inputs:
            budget = int(options.sample_bytes * entry.weight / total)
            if budget:
                texts += sample(_training_lines(entry, budget, bar), budget)
    return tokenizers.train(texts, options)


def _training_lines(entry: _Input, budget: int, bar: tqdm) -> Iterator[str]:
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


def _write(folder: Path, inputs: list[_Input], tokenizer: Tokenizer) -> None:
    """Fill a folder of the cache."""
    sizes = [entry.source.bytes for entry in inputs]
    total = None if None in sizes else sum(size or 0 for size in sizes)
    described = []
    with ExitStack() as stack:
        bar = stack.enter_context(tqdm(desc="tokens", total=total, unit="B", unit_scale=True, disable=None))
        validation = stack.enter_context(closing(TokenWriter(folder / "validation.tokens", tokenizer)))
        for number, entry in enumerate(inputs):
            path = folder / f"train-{number}.tokens"
            writers = {"validation": validation}
            if entry.held_out < 1:
                writers["train"] = stack.enter_context(closing(TokenWriter(path, tokenizer)))
            described.append(_write_source(entry, writers, bar))
    tokenizer.save(folder / "tokenizer.model")
    info = {"tokenizer": tokenizer.hash, "vocabulary": tokenizer.vocabulary, "sources": described}
    (folder / "info.json").write_text(json.dumps(info, indent=2) + "\n")


def _write_source(entry: _Input, writers: dict[str, TokenWriter], bar: tqdm) -> dict[str, Any]:
    """Append the documents of one source to the token files of its splits, and tell what became of each of them."""
    documents, skipped = 0, Counter[str]()
    counts = {split: Count() for split in writers}
    for part in split(entry.source.documents(), entry.held_out):
        if isinstance(part, Skipped):
            skipped[part.reason] += 1
            continue
        written = writers[part.split].write(part.pieces())
        counts[part.split] = counts[part.split].add(written._replace(replaced_bytes=part.replaced_bytes))
        documents += part.start == 0
        bar.update(written.bytes)
    splits = {split: counts[split]._asdict() for split in sorted(counts)}
    return {"name": entry.source.name, "documents": documents, "skipped": dict(skipped), **splits}


def _open(folder: Path, weights: list[float]) -> Tokens:
    tokenizer = tokenizers.load(folder / "tokenizer.model")
    train = [read_tokens(folder / f"train-{number}.tokens", tokenizer) for number in range(len(weights))]
    validation = read_tokens(folder / "validation.tokens", tokenizer)
    return Tokens(folder, tokenizer, train, weights, validation, json.loads((folder / "info.json").read_text()))


def _check(tokens: Tokens, text: recipe.Text) -> None:
    """Refuse text that is too short to train or to validate on."""
    need = text.sequence_length + 1
    for file, source in zip(tokens.train, tokens.info["sources"], strict=False):
        if len(file.tokens) < need:
            raise UsageError(
                f"{source['name']}: the training text has {len(file.tokens):,} tokens, one sequence takes {need:,}: "
                "add text or lower text.sequence_length."
            )
    if not len(tokens.validation.tokens) and text.validation.sources:
        raise UsageError("the validation text is empty: text.validation.sources hold no text. Name others.")
    if not len(tokens.validation.tokens):
        documents = sum(source["documents"] for source in tokens.info["sources"])
        raise UsageError(
            f"the validation text is empty: of {documents:,} documents, text.validation.fraction="
            f"{text.validation.fraction} holds out none. Raise it, or name text.validation.sources."
        )
