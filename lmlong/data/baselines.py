"""Reproducible baselines without a model, in bits per byte of a text.

gzip sees only the text itself, so a model soon beats it. The others also see the training text. The strongest is PPMd,
which predicts each byte from what followed the last bytes before; it needs the package pyppmd.
"""

import lzma
import math
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from lmlong.data.token_file import TokenFile
from lmlong.data.tokenizers.base import Tokenizer

PIECE = 1 << 16
COUNTED = 1 << 24
"""Tokens of a source that are counted for the unigrams, evenly spread over it."""

PRIMING = {"PPMd": 1 << 24, "lzma": 1 << 21}
"""Minimum bytes of the training text that each reads first, or all of a shorter text."""

COMPRESSED = 1 << 20
"""Approximate bytes of the text that PPMd and lzma are measured on."""

ORDER, MEMORY = 16, 1 << 30
"""Bytes from which PPMd predicts the next one, and the most memory that it takes."""


class Primed(NamedTuple):
    """Bits per byte of a text after training text."""

    name: str
    bits_per_byte: float
    bytes: int  # measured, from the beginning of the text
    primed_bytes: int  # of training text read first


class Baselines(NamedTuple):
    """Bits per byte of a text without a model."""

    gzip: float
    unigram: float
    lzma: Primed
    ppmd: Primed | None = None  # None if pyppmd is not installed

    @property
    def primed(self) -> list[Primed]:
        """The baselines that have read training text, the strongest first."""
        return [self.lzma] if self.ppmd is None else [self.ppmd, self.lzma]

    @property
    def bits_per_byte(self) -> dict[str, float]:
        """All baselines by name."""
        primed = {each.name: each.bits_per_byte for each in self.primed}
        return {**primed, "unigram": self.unigram, "gzip": self.gzip}


def measure(train: Sequence[TokenFile], weights: Sequence[float], text: TokenFile, tokenizer: Tokenizer) -> Baselines:
    """Return the baselines of a text, given the training text and the weights of its sources."""
    about = train, weights, text, tokenizer
    with ThreadPoolExecutor() as threads:
        by_lzma, by_ppmd = threads.submit(lzma_bits_per_byte, *about), threads.submit(ppmd_bits_per_byte, *about)
        by_gzip, by_unigrams = gzip_bits_per_byte(text, tokenizer), unigram_bits_per_byte(*about)
        return Baselines(by_gzip, by_unigrams, by_lzma.result(), by_ppmd.result())


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
    """Return the bits per byte of predicting each token by its frequency in the training text. As for a model, bos is
    given and eos is predicted."""
    counts = unigram_counts(train, weights, tokenizer)
    bos, eos = tokenizer.bos, tokenizer.eos
    counts[bos] = (counts[bos] + 1) / 2 if bos == eos else 0  # a document has one of each
    seen = np.zeros(tokenizer.vocabulary, np.int64)
    for begin in range(0, len(text.tokens), PIECE):
        seen += np.bincount(text.tokens[begin : begin + PIECE], minlength=tokenizer.vocabulary)
    seen[bos] -= len(text.starts)
    occurs = seen > 0
    nats = -(seen[occurs] * np.log(counts[occurs] / counts.sum())).sum()
    return float(nats) / math.log(2) / int((seen * tokenizer.token_bytes).sum())


def unigram_counts(train: Sequence[TokenFile], weights: Sequence[float], tokenizer: Tokenizer) -> np.ndarray:
    """Return how often each token occurs in the training text, with add-one smoothing; sources count by their
    weights."""
    by_source = [_count(file, tokenizer) for file in train]
    total = sum(each.sum() for each in by_source)
    counts = np.ones(tokenizer.vocabulary)
    for each, weight in zip(by_source, weights, strict=True):
        counts += each / each.sum() * total * weight / sum(weights)
    return counts


def _count(file: TokenFile, tokenizer: Tokenizer) -> np.ndarray:
    """Return how often each token occurs in COUNTED tokens of a file, in evenly spaced pieces."""
    pieces = range(0, len(file.tokens), PIECE)
    stride = -(-len(pieces) // (COUNTED // PIECE))
    return sum(
        (np.bincount(file.tokens[begin : begin + PIECE], minlength=tokenizer.vocabulary) for begin in pieces[::stride]),
        np.zeros(tokenizer.vocabulary, np.int64),
    )


def lzma_bits_per_byte(
    train: Sequence[TokenFile], weights: Sequence[float], text: TokenFile, tokenizer: Tokenizer
) -> Primed:
    """Return lzma's bits per byte of a text after training text: the compressed size of both, minus that of only the
    training text."""
    primer, measured = _primer(train, weights, tokenizer, PRIMING["lzma"]), _beginning(text, tokenizer, COMPRESSED)
    added = _lzma_size(primer + measured) - _lzma_size(primer)
    return Primed("lzma", 8 * added / len(measured), len(measured), len(primer))


def ppmd_bits_per_byte(
    train: Sequence[TokenFile], weights: Sequence[float], text: TokenFile, tokenizer: Tokenizer
) -> Primed | None:
    """Return PPMd's bits per byte of a text after training text, to within some bytes; None without pyppmd."""
    with suppress(ImportError):
        import pyppmd

        primer, measured = _primer(train, weights, tokenizer, PRIMING["PPMd"]), _beginning(text, tokenizer, COMPRESSED)
        encoder = pyppmd.Ppmd7Encoder(ORDER, MEMORY)
        encoder.encode(primer)
        added = len(encoder.encode(measured)) + len(encoder.flush())
        return Primed("PPMd", 8 * added / len(measured), len(measured), len(primer))
    return None


def _primer(train: Sequence[TokenFile], weights: Sequence[float], tokenizer: Tokenizer, size: int) -> bytes:
    """Return the beginnings of all sources of the training text, in proportion to their weights."""
    shares = [int(size * weight / sum(weights)) for weight in weights]
    return b"".join(_beginning(file, tokenizer, share) for file, share in zip(train, shares, strict=True))


def _lzma_size(data: bytes) -> int:
    return len(lzma.compress(data, preset=6))


def _beginning(file: TokenFile, tokenizer: Tokenizer, size: int) -> bytes:
    """Return the first `size` bytes of the text of a file, rounded up to a whole piece."""
    read, pieces = 0, []
    for data in _text(file, tokenizer):
        pieces.append(data)
        read += len(data)
        if read >= size:
            break
    return b"".join(pieces)


def _text(file: TokenFile, tokenizer: Tokenizer) -> Iterator[bytes]:
    """Yield the text of a token file, without bos and eos."""
    for begin in range(0, len(file.tokens), PIECE):
        yield tokenizer.decode_bytes(file.tokens[begin : begin + PIECE].tolist())
