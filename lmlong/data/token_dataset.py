"""Documents -> token files in the cache, made once for each content of the sources and each tokenizer.

A folder of the cache holds tokenizer.model, info.json, validation.tokens, train-0.tokens and so on, one for each
training source, and beside each token file the positions at which its documents begin.
"""

import json
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from lmlong import recipe
from lmlong.data import tokenizer as tokenizers
from lmlong.data.character_tokenizer import UnknownCharacter
from lmlong.data.encoding import UTF8
from lmlong.data.notes import by_reason
from lmlong.data.reading import Skipped
from lmlong.data.sources import Input, check, open_inputs
from lmlong.data.split import Part, split
from lmlong.data.token_file import Count, TokenFile, TokenWriter, read_tokens
from lmlong.data.tokenizer import Tokenizer
from lmlong.data.tokenizer_training import tokenizer_of
from lmlong.errors import UsageError
from lmlong.io import manifest
from lmlong.io.cache import cache_folder, fetch, key_of
from lmlong.io.manifest import Format

FORMAT = Format("tokens", 3)

TEXT = (".tokens", ".starts")
"""Suffixes of the files that hold the text."""


class TokenDataset(NamedTuple):
    """The tokens of a recipe's text, with all that training needs to know of them."""

    folder: Path
    tokenizer: Tokenizer
    train: list[TokenFile]  # one for each source
    weights: list[float]  # of the sources
    validation: TokenFile
    info: dict[str, Any]  # what was read, skipped and written
    identity: str  # the same for the same tokens, wherever the text was stored


def prepare(text: recipe.Text, tokenizer: Tokenizer | None = None) -> TokenDataset:
    """Return the tokens of a recipe's text, from the cache or made now; `tokenizer` replaces the recipe's."""
    inputs = open_inputs(text)
    chosen = tokenizer or tokenizer_of(inputs, text.tokenizer)
    key = key_of(FORMAT, text.errors, chosen.hash, [(entry.source.fingerprint, entry.held_out) for entry in inputs])
    folder = fetch(cache_folder() / "tokens" / key, FORMAT, lambda temporary: _write(temporary, inputs, chosen))
    tokens = _open(folder, [options.weight for options in text.sources])
    for entry, source in zip(inputs, tokens.info["sources"], strict=True):  # known without reading, so never cached
        source["left_out"] = by_reason(entry.source.left_out)
    _check(tokens, text)
    return tokens


def validation_fields(text: recipe.Text) -> list[Mapping[str, Any]]:
    """Return the fields of each validation document, in the order of the token file. The sources are read again: token
    files are the same for the same text, whatever its files are called."""
    return [
        part.document.fields
        for entry in open_inputs(text)
        if entry.held_out
        for part in split(entry.source.documents(), entry.held_out)
        if isinstance(part, Part) and part.split == "validation" and next(part.pieces(), None)
    ]


def _write(folder: Path, inputs: list[Input], tokenizer: Tokenizer) -> None:
    """Write the token files to a folder of the cache."""
    check(inputs)
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


def _write_source(entry: Input, writers: dict[str, TokenWriter], bar: tqdm) -> dict[str, Any]:
    """Append the documents of one source to the token files of its splits, and return counts of read and skipped."""
    read = Counter({"documents": 0, "bytes": 0, "replaced_bytes": 0, "put_in_bytes": 0, "recoded_bytes": 0})
    skipped: list[Skipped] = []
    recoded: list[Skipped] = []
    counts = {split: Count() for split in writers}
    for part in split(entry.source.documents(), entry.held_out):
        if isinstance(part, Skipped):
            skipped.append(part)
            continue
        try:
            written = writers[part.split].write(part.pieces())
        except UnknownCharacter as error:
            raise error.within(part.document) from None
        counts[part.split] = counts[part.split].add(written)
        bar.update(written.bytes)
        if part.start == 0:
            found = part.read
            replaced, put_in = found.replaced_bytes, found.put_in_bytes
            change = found.bytes - put_in - (found.read_bytes - replaced)  # by another encoding than UTF-8
            read.update(documents=1, bytes=found.read_bytes, replaced_bytes=replaced, put_in_bytes=put_in)
            read.update(recoded_bytes=change)
            if part.document.encoding != UTF8:
                recoded.append(Skipped(part.document.name, part.document.encoding, found.read_bytes))
    splits = {split: counts[split]._asdict() for split in sorted(counts)}
    told = {"skipped": by_reason(skipped), "encodings": by_reason(recoded)}
    return {"name": entry.source.name, "read": read, **told, **splits}


def _open(folder: Path, weights: list[float]) -> TokenDataset:
    tokenizer = tokenizers.load(folder / "tokenizer.model")
    train = [read_tokens(folder / f"train-{number}.tokens", tokenizer) for number in range(len(weights))]
    validation = read_tokens(folder / "validation.tokens", tokenizer)
    files = manifest.read(folder, FORMAT).files
    identity = key_of(tokenizer.hash, [(name, files[name]["sha256"]) for name in files if name.endswith(TEXT)])
    return TokenDataset(
        folder, tokenizer, train, weights, validation, json.loads((folder / "info.json").read_text()), identity
    )


def _check(tokens: TokenDataset, text: recipe.Text) -> None:
    """Refuse a text that is too short to train or to validate on."""
    need = text.sequence_length + 1 if text.rows == "windows" else 2
    for file, source in zip(tokens.train, tokens.info["sources"], strict=False):
        if len(file.tokens) < need:
            raise UsageError(
                f"{source['name']}: the training text has {len(file.tokens):,} tokens, one sequence takes {need:,}: "
                "add text or lower text.sequence_length."
            )
    if not len(tokens.validation.tokens) and text.validation.sources:
        raise UsageError("the validation text is empty: text.validation.sources hold no text. Name others.")
    if not len(tokens.validation.tokens):
        documents = sum(source["read"]["documents"] for source in tokens.info["sources"])
        raise UsageError(
            f"the validation text is empty: of {documents:,} documents, text.validation.fraction="
            f"{text.validation.fraction} holds out none. Raise it, or name text.validation.sources."
        )
