"""Sums of the loss for each document, and the standard errors of their ratios.

Tokens of one document are not independent, so standard errors are over documents, not tokens.
"""

import math
from typing import NamedTuple

import numpy as np

from lmlong.model.metrics import LossTotals
from lmlong.report.json_values import json_keys


class Estimate(NamedTuple):
    """A ratio of sums."""

    value: float
    error: float  # standard error

    @property
    def band(self) -> tuple[float, float]:
        """The value less and plus two standard errors."""
        return self.value - 2 * self.error, self.value + 2 * self.error


UNKNOWN = Estimate(math.nan, math.nan)


@json_keys(
    "nats=totals.nats",
    "tokens=totals.tokens",
    "bytes=totals.bytes",
    "documents",
    "nats_per_token=per_token.value",
    "nats_error",
    "perplexity=totals.perplexity",
    "bits_per_byte=per_byte.value",
    "bits_error",
)
class Sums:
    """The nats, tokens and bytes of the targets of each document of a text."""

    def __init__(self, documents: int):
        self.nats, self.tokens, self.bytes = (np.zeros(documents) for _ in range(3))

    def add(self, document: int, nats: float, tokens: int, size: int) -> None:
        self.nats[document] += nats
        self.tokens[document] += tokens
        self.bytes[document] += size

    @property
    def documents(self) -> int:
        """The number of documents with targets."""
        return int(np.count_nonzero(self.tokens))

    @property
    def totals(self) -> LossTotals:
        return LossTotals(math.fsum(self.nats), int(self.tokens.sum()), int(self.bytes.sum()))

    @property
    def per_token(self) -> Estimate:
        """The nats per token."""
        return Estimate(self.totals.nats_per_token, self.nats_error)

    @property
    def per_byte(self) -> Estimate:
        """The bits per byte."""
        return Estimate(self.totals.bits_per_byte, self.bits_error)

    @property
    def nats_error(self) -> float:
        """Standard error of the nats per token."""
        return error_of_ratio(self.nats, self.tokens)

    @property
    def bits_error(self) -> float:
        """Standard error of the bits per byte."""
        return error_of_ratio(self.nats / math.log(2), self.bytes)

    def bits_error_from(self, other: "Sums") -> float:
        """Return the standard error of the change in bits per byte from other sums of the same targets."""
        return error_of_ratio((self.nats - other.nats) / math.log(2), self.bytes)

    def has_targets_of(self, other: "Sums") -> bool:
        """Return whether the targets of both have the same number of bytes in each document."""
        return np.array_equal(self.bytes, other.bytes)

    def bits_above(self, other: "Sums") -> Estimate:
        """Return by how many bits per byte these exceed others on the same bytes."""
        assert self.has_targets_of(other), "not the same targets"
        more = (self.nats - other.nats) / math.log(2)
        return Estimate(float(more.sum() / self.bytes.sum()), self.bits_error_from(other))

    def above(self, other: "Sums") -> Estimate:
        """Return by how many nats per token these exceed others on the same targets."""
        assert np.array_equal(self.tokens, other.tokens), "not the same targets"
        more, tokens = self.nats - other.nats, self.tokens.sum()
        return Estimate(float(more.sum() / tokens) if tokens else math.nan, error_of_ratio(more, self.tokens))


def error_of_ratio(above: np.ndarray, below: np.ndarray) -> float:
    """Return the standard error of sum(above) / sum(below) over independent pairs, by the jackknife: how far the ratio
    moves when one pair is left out. nan for fewer than two pairs.

    The usual linearized formula is too small if one of a few documents is most of the text.
    """
    counted = below > 0
    above, below = above[counted], below[counted]
    count = len(below)
    if count < 2:
        return math.nan
    without = (above.sum() - above) / (below.sum() - below)
    return math.sqrt((count - 1) / count * float(((without - without.mean()) ** 2).sum()))
