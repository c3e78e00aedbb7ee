"""Baselines that need no model, in bits per byte of a text: numbers that anyone can repeat.

gzip knows nothing but the text itself, of which a short one shows it little, so a model soon beats it. The other two
know the training text as well, and a model that has only begun to learn does not beat them.
"""

import lzma
import math
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from lmlong.data.token_file import TokenFile
from lmlong.data.tokenizer import Tokenizer

PIECE = 1 << 16
COUNTED = 1 << 24
"""Tokens of a source that are counted for the unigrams, evenly spread over it."""

PRIMING = 1 << 21
"""Bytes of the training text, at the least, that lzma reads first; where it has fewer, all of it."""

COMPRESSED = 1 << 20
"""Bytes of the text that lzma is measured on, about."""


class Baselines(NamedTuple):
    """Bits per byte of a text without a model."""

    gzip: float
    unigram: float
    lzma: float
    lzma_bytes: int  # of the text, from its beginning, that lzma was measured on
    primed_bytes: int  # of training text that lzma had read before

    @property
    def bits_per_byte(self) -> dict[str, float]:
        """The figure of each, by name."""
        return {"lzma": self.lzma, "unigram": self.unigram, "gzip": self.gzip}


def measure(train: Sequence[TokenFile], weights: Sequence[float], text: TokenFile, tokenizer: Tokenizer) -> Baselines:
    """Return the baselines of a text, given the text that a model is trained on and the weights of its sources."""
    return Baselines(
        gzip_bits_per_byte(text, tokenizer),
        unigram_bits_per_byte(train, weights, text, tokenizer),
        *lzma_bits_per_byte(train, weights, text, tokenizer),
    )


def gzip_bits_per_byte(file: TokenFile, tokenizer: Tokenizer) -> float:
    """Return the bits that gzip -9 spends per byte of the text in a token file, all documents in one stream."""
    stream = zlib.compressobj(level=9, wbits=31)  # 31: the gzip format
    read = written = 0
    for data in _text(file, tokenizer):
        read += len(data)
        written += len(stream.compress(data))
    return 8 * (written + len(stream.flush())) / read


def unigram_bits_per_byte(
    train: Sequence[TokenFile], weights: Sequence[float], text: TokenFile, tokenizer: Tokenizer
) -> float:
    """Return the bits per byte of predicting each token by how often it occurs in the training text, add-one smoothed;
    as of a model, bos is given and eos is not."""
    counts = np.ones(tokenizer.vocabulary)
    found = [_count(file, tokenizer) for file in train]
    total = sum(each.sum() for each in found)
    for each, weight in zip(found, weights, strict=True):
        counts += each / each.sum() * total * weight / sum(weights)
    bos, eos = tokenizer.bos, tokenizer.eos
    counts[bos] = (counts[bos] + 1) / 2 if bos == eos else 0  # a document has one of each
    seen = np.zeros(tokenizer.vocabulary, np.int64)
    for begin in range(0, len(text.tokens), PIECE):
        seen += np.bincount(text.tokens[begin : begin + PIECE], minlength=tokenizer.vocabulary)
    seen[bos] -= len(text.starts)
    occurs = seen > 0
    nats = -(seen[occurs] * np.log(counts[occurs] / counts.sum())).sum()
    return float(nats) / math.log(2) / int((seen * tokenizer.token_bytes).sum())


def _count(file: TokenFile, tokenizer: Tokenizer) -> np.ndarray:
    """Return how often each token occurs in COUNTED tokens of a file, in even pieces."""
    pieces = range(0, len(file.tokens), PIECE)
    stride = -(-len(pieces) // (COUNTED // PIECE))
    return sum(
        (np.bincount(file.tokens[begin : begin + PIECE], minlength=tokenizer.vocabulary) for begin in pieces[::stride]),
        np.zeros(tokenizer.vocabulary, np.int64),
    )


def lzma_bits_per_byte(
    train: Sequence[TokenFile], weights: Sequence[float], text: TokenFile, tokenizer: Tokenizer
) -> tuple[float, int, int]:
    """Return the bits that lzma spends per byte of a text after it has read training text, and how many bytes of both:
    the size of both together less that of the training text alone."""
    share = [int(PRIMING * weight / sum(weights)) for weight in weights]
    primer = b"".join(_beginning(file, tokenizer, size) for file, size in zip(train, share, strict=True))
    measured = _beginning(text, tokenizer, COMPRESSED)
    both, alone = _lzma_size(primer + measured), _lzma_size(primer)
    return 8 * (both - alone) / len(measured), len(measured), len(primer)


def _lzma_size(data: bytes) -> int:
    return len(lzma.compress(data, preset=6))


def _beginning(file: TokenFile, tokenizer: Tokenizer, size: int) -> bytes:
    """Return the text of a file, up to the piece that passes `size` bytes."""
    read, found = 0, []
    for data in _text(file, tokenizer):
        found.append(data)
        read += len(data)
        if read >= size:
            break
    return b"".join(found)


def _text(file: TokenFile, tokenizer: Tokenizer) -> Iterator[bytes]:
    """Iterate over the text of a token file, without the ends of its documents."""
    for begin in range(0, len(file.tokens), PIECE):
        yield tokenizer.decode_bytes(file.tokens[begin : begin + PIECE])
