"""Documents -> token files in the cache, made once for each content of the sources and each tokenizer.

A folder of the cache holds tokenizer.model, info.json, validation.tokens, train-0.tokens and so on, one for each
training source, and beside each token file the positions at which its documents begin.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lmlong import recipe
from lmlong.data.duplicates import divide, split_key
from lmlong.data.notes import by_reason
from lmlong.data.sources import open_inputs
from lmlong.data.split import Part
from lmlong.data.token_encoding import cores
from lmlong.data.token_file import TokenFile, read_tokens
from lmlong.data.token_writing import write
from lmlong.data.tokenizers.base import Tokenizer
from lmlong.data.tokenizers.factory import load_tokenizer
from lmlong.data.tokenizers.training import tokenizer_of
from lmlong.errors import UsageError
from lmlong.io import folder_manifest
from lmlong.io.cache import cache_folder, fetch, key_of
from lmlong.io.files import parse_json
from lmlong.io.folder_manifest import Format

FORMAT = Format("tokens", 4)

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


def prepare(text: recipe.Text, tokenizer: Tokenizer | None = None, processes: int | None = None) -> TokenDataset:
    """Return the tokens of a recipe's text, from the cache or made now; `tokenizer` replaces the recipe's.

    They are made by so many processes, one for each core that there is unless told otherwise, and are the same for any
    number of them. Work that was cut off goes on.
    """
    inputs = open_inputs(text)
    chosen = tokenizer or tokenizer_of(inputs, text.tokenizer, text.duplicates)
    key = key_of(FORMAT, chosen.hash, *split_key(inputs, text.duplicates))
    folder = fetch(
        cache_folder() / "tokens" / key,
        FORMAT,
        lambda unfinished: write(unfinished, inputs, chosen, text.duplicates, processes or cores()),
        resumable=True,
    )
    tokens = _open(folder, [options.weight for options in text.sources], len(inputs))
    for entry, source in zip(inputs, tokens.info["sources"], strict=True):  # known without reading, so never cached
        source["left_out"] = by_reason(entry.source.left_out)
    _check(tokens, text)
    return tokens


def validation_fields(text: recipe.Text) -> list[Mapping[str, Any]]:
    """Return the fields of each validation document, in the order of the token file. The sources are read again: token
    files are the same for the same text, whatever its files are called."""
    return [
        part.document.fields
        for _, part in divide(open_inputs(text), text.duplicates)
        if isinstance(part, Part) and part.split == "validation" and next(part.pieces(), None)
    ]


def _open(folder: Path, weights: list[float], inputs: int) -> TokenDataset:
    tokenizer = load_tokenizer(folder / "tokenizer.model")
    train = [read_tokens(folder / f"train-{number}.tokens", tokenizer) for number in range(len(weights))]
    validation = read_tokens(folder / "validation.tokens", tokenizer)
    files = folder_manifest.read_manifest(folder, FORMAT).files
    identity = key_of(tokenizer.hash, [(name, files[name]["sha256"]) for name in files if name.endswith(TEXT)])
    return TokenDataset(folder, tokenizer, train, weights, validation, _read_info(folder, inputs), identity)


def _read_info(folder: Path, inputs: int) -> dict[str, Any]:
    """Return what was read of each source, those of validation among them, as `write` noted it."""
    try:
        info = parse_json((folder / "info.json").read_bytes())
        described = info["sources"]
        assert len(described) == inputs
        for source in described:
            assert isinstance(source["name"], str) and type(source["read"]["documents"]) is int
    except (ValueError, KeyError, TypeError, AssertionError):
        raise UsageError(f"{folder / 'info.json'}: damaged. Delete its folder, which is then made again.") from None
    return info


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
