"""What was lost on the targets of each document: ratios of the sums, and how far they may be off.

Tokens of one document are alike, so documents and not tokens are what a standard error counts.
"""

import math

import numpy as np

from lmlong.model.scoring import Totals


class Sums:
    """Nats, tokens and bytes of the targets, for each document of a text."""

    def __init__(self, documents: int):
        self.nats, self.tokens, self.bytes = (np.zeros(documents) for _ in range(3))

    def add(self, document: int, nats: float, tokens: int, size: int) -> None:
        self.nats[document] += nats
        self.tokens[document] += tokens
        self.bytes[document] += size

    @property
    def documents(self) -> int:
        """How many have targets."""
        return int(np.count_nonzero(self.tokens))

    @property
    def totals(self) -> Totals:
        return Totals(math.fsum(self.nats), int(self.tokens.sum()), int(self.bytes.sum()))

    @property
    def nats_error(self) -> float:
        """Standard error of the nats per token."""
        return error_of_ratio(self.nats, self.tokens)

    @property
    def bits_error(self) -> float:
        """Standard error of the bits per byte."""
        return error_of_ratio(self.nats / math.log(2), self.bytes)

    def bits_error_from(self, other: "Sums") -> float:
        """Standard error of the change in bits per byte from another reading of the same targets."""
        return error_of_ratio((self.nats - other.nats) / math.log(2), self.bytes)

    def above(self, other: "Sums") -> tuple[float, float]:
        """By how many nats per token this lost more than the other on the same targets, and its standard error."""
        assert np.array_equal(self.tokens, other.tokens), "not the same targets"
        more = self.nats - other.nats
        return float(more.sum() / self.tokens.sum()), error_of_ratio(more, self.tokens)


def error_of_ratio(above: np.ndarray, below: np.ndarray) -> float:
    """Standard error of sum(above) / sum(below), each pair a draw of its own; nan where there are fewer than two."""
    counted = below > 0
    above, below = above[counted], below[counted]
    count = len(below)
    if count < 2:
        return math.nan
    off = above - above.sum() / below.sum() * below
    return math.sqrt(count / (count - 1) * float((off**2).sum())) / float(below.sum())
