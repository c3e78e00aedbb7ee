"""Token files in the cache, written once for each content of the sources and each tokenizer.

A folder of the cache holds tokenizer.model, info.json, validation.tokens, train-0.tokens and so on for each training
source, and for each token file a file of document positions.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict

from lmlong import recipe
from lmlong.data.duplicates import split_key
from lmlong.data.notes import by_reason
from lmlong.data.sources import open_inputs
from lmlong.data.token_encoding import cores
from lmlong.data.token_file import Count, TokenFile, check_tokens, read_tokens
from lmlong.data.token_file_writer import VALIDATION
from lmlong.data.token_writing import write
from lmlong.data.tokenizers.base import Tokenizer
from lmlong.data.tokenizers.factory import load_tokenizer
from lmlong.data.tokenizers.training import tokenizer_of
from lmlong.errors import UsageError
from lmlong.io import folder_manifest
from lmlong.io.cache import cache_folder, fetch, key_of
from lmlong.io.folder_manifest import DamagedFolder, Format

FORMAT = Format("tokens", 4)

INFO = "info.json"

TEXT = (".tokens", ".starts")
"""Suffixes of the files that hold the text."""


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True)


class Documents(_Strict):
    """Documents that were skipped, or read in another encoding."""

    documents: int
    bytes: int
    names: list[str]


class Read(_Strict):
    """What was read of a source."""

    documents: int
    bytes: int
    replaced_bytes: int
    put_in_bytes: int
    replaced_characters: int = 0


class Source(_Strict):
    """A source of training and validation text."""

    name: str
    read: Read
    skipped: dict[str, Documents]
    encodings: dict[str, Documents]
    near_copies: Documents
    train: Count | None = None
    validation: Count | None = None


class Overlap(_Strict):
    """Windows of the held-out text that occur in the training text."""

    share: float
    window_bytes: int


class Info(_Strict):
    """What commands read in the description of token files."""

    sources: list[Source]
    overlap: Overlap


class TokenDataset(NamedTuple):
    """The tokens of a recipe's text, and their tokenizer, weights and description."""

    folder: Path
    tokenizer: Tokenizer
    train: list[TokenFile]  # one for each source
    weights: list[float]  # of the sources
    validation: TokenFile
    info: dict[str, Any]  # what was read, skipped and written
    identity: str  # equal for equal tokens, wherever the text was stored

    @property
    def train_tokens(self) -> int:
        """The number of training tokens in all sources."""
        return sum(len(source.tokens) for source in self.train)


def prepare(text: recipe.Text, tokenizer: Tokenizer | None = None, processes: int | None = None) -> TokenDataset:
    """Return the tokens of a recipe's text, cached. `tokenizer` replaces the recipe's.

    `processes`, by default one for each core, encode the text; their number does not affect the tokens. Interrupted
    work is resumed.
    """
    inputs = open_inputs(text)
    chosen = tokenizer or tokenizer_of(inputs, text.tokenizer, text.duplicates)
    key = key_of(FORMAT, chosen.hash, *split_key(inputs, text.duplicates))
    folder = fetch(
        cache_folder() / "tokens" / key,
        FORMAT,
        lambda unfinished: write(unfinished, inputs, chosen, text.duplicates, processes or cores()),
        resumable=True,
        check=lambda folder: _check_readable(folder, len(text.sources), len(inputs)),
    )
    tokens = _open(folder, [options.weight for options in text.sources])
    for entry, source in zip(inputs, tokens.info["sources"], strict=True):  # known without reading, so never cached
        source["left_out"] = by_reason(entry.source.left_out)
    _check(tokens, text)
    return tokens


def _open(folder: Path, weights: list[float]) -> TokenDataset:
    tokenizer = load_tokenizer(folder / "tokenizer.model")
    *train, validation = (read_tokens(folder / name, tokenizer) for name in _token_files(len(weights)))
    files = folder_manifest.read_manifest(folder, FORMAT).files
    identity = key_of(tokenizer.hash, [(name, files[name]["sha256"]) for name in files if name.endswith(TEXT)])
    info = json.loads((folder / INFO).read_bytes())
    return TokenDataset(folder, tokenizer, train, weights, validation, info, identity)


def _token_files(sources: int) -> list[str]:
    return [*(f"train-{number}.tokens" for number in range(sources)), VALIDATION]


def _check_readable(folder: Path, sources: int, inputs: int) -> None:
    """Raise DamagedFolder or UsageError unless the files of a folder are what `write` writes."""
    try:
        tokenizer = load_tokenizer(folder / "tokenizer.model")
        for name in _token_files(sources):
            check_tokens(folder / name, tokenizer)
        if len(Info.model_validate_json((folder / INFO).read_bytes()).sources) != inputs:
            raise ValueError
    except OSError as error:
        raise DamagedFolder(f"{error.filename}: {error.strerror}.") from None
    except ValueError:
        raise DamagedFolder(f"{folder / INFO}: damaged.") from None


def _check(tokens: TokenDataset, text: recipe.Text) -> None:
    """Raise UsageError if a text is too short to train or to validate on."""
    need = text.sequence_length + 1 if text.rows == "windows" else 2
    for file, source in zip(tokens.train, tokens.info["sources"], strict=False):
        if len(file.tokens) < need:
            raise UsageError(
                f"{source['name']}: the training text has {len(file.tokens):,} tokens, but one sequence needs "
                f"{need:,}. Add text or lower text.sequence_length."
            )
    if not len(tokens.validation.tokens) and text.validation.sources:
        raise UsageError("the validation text is empty: text.validation.sources hold no text. Name others.")
    if not len(tokens.validation.tokens):
        documents = sum(source["read"]["documents"] for source in tokens.info["sources"])
        raise UsageError(
            f"the validation text is empty: of {documents:,} documents, text.validation.fraction="
            f"{text.validation.fraction} holds out none. Raise it, or name text.validation.sources."
        )
