"""Token files in the cache, written once for each content of the sources and each tokenizer.

A folder of the cache holds tokenizer.model, info.json, validation.tokens, train-0.tokens and so on for each training
source, and for each token file a file of document positions.
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
    )
    tokens = _open(folder, [options.weight for options in text.sources], len(inputs))
    for entry, source in zip(inputs, tokens.info["sources"], strict=True):  # known without reading, so never cached
        source["left_out"] = by_reason(entry.source.left_out)
    _check(tokens, text)
    return tokens


def validation_fields(text: recipe.Text) -> list[Mapping[str, Any]]:
    """Return the fields of each validation document, in the order of the token file. Reads the sources again, since
    token files do not depend on file names."""
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
    """Return the info that `write` stored: what was read of each training and validation source."""
    try:
        info = parse_json((folder / "info.json").read_bytes())
        described = info["sources"]
        assert len(described) == inputs
        for source in described:
            assert isinstance(source["name"], str) and type(source["read"]["documents"]) is int
    except (ValueError, KeyError, TypeError, AssertionError):
        raise UsageError(f"{folder / 'info.json'}: damaged. Delete its folder; lmlong rebuilds it.") from None
    return info


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
