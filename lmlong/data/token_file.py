"""Tokens on disk: one flat file of token ids, mapped into memory, and one of the positions at which documents begin."""

import os
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lmlong.data.tokenizer import Tokenizer


class TokenFile(NamedTuple):
    """Documents one after the other, each as bos ... eos."""

    tokens: np.ndarray  # (tokens,) uint16 or uint32
    starts: np.ndarray  # (documents,) int64, the position of each document's bos

    def first(self, tokens: int | None) -> "TokenFile":
        """Return the first `tokens` tokens, or all; the last document may be cut."""
        kept = self.tokens[:tokens]
        return TokenFile(kept, self.starts[self.starts < len(kept)])


class Count(NamedTuple):
    """Size of one split of a source; bytes are of text, tokens include bos and eos, some stand for U+FFFD in the place
    of characters that the tokenizer does not know."""

    documents: int = 0
    bytes: int = 0
    tokens: int = 0
    replaced: int = 0

    def add(self, other: "Count") -> "Count":
        """Return the sum of two counts."""
        return Count(*(mine + others for mine, others in zip(self, other, strict=True)))


class TokenWriter:
    """A writer that appends documents to a token file."""

    def __init__(self, path: Path, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._type = token_type(tokenizer)
        self._tokens = path.open("wb")
        self._starts = _starts_path(path).open("wb")
        self._place = 0

    def write(self, pieces: Iterable[str]) -> Count:
        """Append a document; one without text is not written."""
        size, replaced, start = 0, 0, self._place
        for tokens in self._tokenizer.encode_pieces(pieces):
            if self._place == start:
                self._put(np.array([self._tokenizer.bos]))
                self._starts.write(np.int64(start).tobytes())
            self._put(tokens)
            size += int(self._tokenizer.token_bytes[tokens].sum())
            replaced += 0 if self._tokenizer.replacement is None else int((tokens == self._tokenizer.replacement).sum())
        if self._place == start:
            return Count()
        self._put(np.array([self._tokenizer.eos]))
        return Count(1, size, self._place - start, replaced)

    def close(self) -> None:
        """Flush the files to disk and close them."""
        for file in (self._tokens, self._starts):
            file.flush()
            os.fsync(file.fileno())
            file.close()

    def _put(self, tokens: np.ndarray) -> None:
        self._tokens.write(tokens.astype(self._type).tobytes())
        self._place += len(tokens)


def read_tokens(path: Path, tokenizer: Tokenizer) -> TokenFile:
    """Map a token file into memory."""
    return TokenFile(_map(path, token_type(tokenizer)), _map(_starts_path(path), np.dtype("<i8")))


def tokens_of(texts: Iterable[str], tokenizer: Tokenizer) -> TokenFile:
    """Return the tokens of documents in memory, as a file of them has; one without text is left out."""
    documents = [[tokenizer.bos, *tokenizer.encode(text), tokenizer.eos] for text in texts if text]
    starts = np.cumsum([0, *map(len, documents)], dtype=np.int64)[:-1]
    return TokenFile(np.fromiter(chain.from_iterable(documents), token_type(tokenizer)), starts)


def token_type(tokenizer: Tokenizer) -> np.dtype:
    """Return the smallest type that holds every id, little-endian on every machine."""
    return np.dtype("<u2" if tokenizer.vocabulary <= 1 << 16 else "<u4")


def _map(path: Path, dtype: np.dtype) -> np.ndarray:
    if not path.stat().st_size:  # an empty file cannot be mapped
        return np.zeros(0, dtype)
    return np.memmap(path, dtype, mode="r")


def _starts_path(path: Path) -> Path:
    return path.with_suffix(".starts")
