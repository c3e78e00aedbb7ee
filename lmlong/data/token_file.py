"""Tokens on disk: a flat file of token ids, mapped into memory, and a file of document positions."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lmlong.data.tokenizers.base import Tokenizer
from lmlong.io.folder_manifest import DamagedFolder

POSITIONS = np.dtype("<i8")
"""The type of the positions of documents."""

CHUNK = 1 << 20
"""Numbers that are checked at a time."""


class TokenFile(NamedTuple):
    """Consecutive documents, each as bos ... eos."""

    tokens: np.ndarray  # (tokens,) uint16 or uint32
    starts: np.ndarray  # (documents,) int64, position of each document's bos
    labels: Sequence[str] = ()  # of the documents, if they were asked for

    def first(self, tokens: int | None) -> "TokenFile":
        """Return the first `tokens` tokens, or all if None. The last document may be cut."""
        first = self.tokens[:tokens]
        starts = self.starts[self.starts < len(first)]
        return TokenFile(first, starts, self.labels[: len(starts)])


@dataclass(frozen=True)
class Count:
    """Size of one split of a source: documents, bytes of text, and tokens including bos and eos."""

    documents: int = 0
    bytes: int = 0
    tokens: int = 0

    def add(self, other: "Count") -> "Count":
        """Return the sum of two counts."""
        return Count(self.documents + other.documents, self.bytes + other.bytes, self.tokens + other.tokens)


def check_tokens(path: Path, tokenizer: Tokenizer) -> None:
    """Raise DamagedFolder if tokens or positions of a file are out of range."""
    if mistake := _mistake(path, token_type(tokenizer), tokenizer.vocabulary):
        raise DamagedFolder(f"{path}: damaged, {mistake}.")


def read_tokens(path: Path, tokenizer: Tokenizer) -> TokenFile:
    """Map a token file into memory."""
    dtype = token_type(tokenizer)
    return TokenFile(_map(path, dtype), _map(starts_path(path), POSITIONS))


def tokens_of(texts: Iterable[str], tokenizer: Tokenizer) -> TokenFile:
    """Return the tokens of documents in memory. Empty documents are left out."""
    documents = [[tokenizer.bos, *tokenizer.encode(text), tokenizer.eos] for text in texts if text]
    starts = np.cumsum([0, *map(len, documents)], dtype=np.int64)[:-1]
    return TokenFile(np.fromiter(chain.from_iterable(documents), token_type(tokenizer)), starts)


def token_type(tokenizer: Tokenizer) -> np.dtype:
    """Return the smallest type that holds every id, little-endian on every machine."""
    return np.dtype("<u2" if tokenizer.vocabulary <= 1 << 16 else "<u4")


def _mistake(path: Path, dtype: np.dtype, vocabulary: int) -> str:
    """Return what is wrong with a token file or its positions, which are used as indices; an empty string if valid."""
    size, starts = path.stat().st_size, starts_path(path)
    if size % dtype.itemsize or starts.stat().st_size % POSITIONS.itemsize:
        return "its size is not a multiple of a number's size"
    with path.open("rb") as file:  # not mapped: the pages read would count as memory of this process
        while len(tokens := np.fromfile(file, dtype, CHUNK)):
            if tokens.max() >= vocabulary:
                return f"it has tokens beyond the vocabulary of {vocabulary:,}"
    count, last = size // dtype.itemsize, -1
    with starts.open("rb") as file:
        while len(positions := np.fromfile(file, POSITIONS, CHUNK)):
            if (last < 0 and positions[0] != 0) or (np.diff(positions, prepend=last) <= 0).any():
                return "the positions of its documents do not increase from 0"
            last = int(positions[-1])
    return "" if last < count and (last >= 0 or not count) else "the positions of its documents are out of range"


def _map(path: Path, dtype: np.dtype) -> np.ndarray:
    if not path.stat().st_size:  # an empty file cannot be mapped
        return np.zeros(0, dtype)
    return np.memmap(path, dtype, mode="r")


def starts_path(path: Path) -> Path:
    """Return the path of a token file's document positions."""
    return path.with_suffix(".starts")
