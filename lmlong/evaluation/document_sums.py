"""Sums of the loss for each document, and the standard errors of their ratios.

Tokens of one document are not independent, so standard errors are over documents, not tokens; if documents are not
independent either, such as those of one author, over clusters of documents.

A document has the fields of its record, or for a file `file` and `folder`, its name and the folder's. `author`, if no
record has it, is the name of the file up to its first "-", as in burroughs-tarzan-of-the-apes.txt.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lmlong.errors import UsageError, nearest
from lmlong.model.metrics import LossTotals
from lmlong.report.json_values import json_keys


class Estimate(NamedTuple):
    """A ratio of sums."""

    value: float
    error: float  # standard error


UNKNOWN = Estimate(math.nan, math.nan)


@json_keys(
    "nats=totals.nats",
    "tokens=totals.tokens",
    "bytes=totals.bytes",
    "documents",
    "clusters",
    "nats_per_token=per_token.value",
    "nats_error",
    "perplexity=totals.perplexity",
    "bits_per_byte=per_byte.value",
    "bits_error",
)
class Sums:
    """The nats, tokens and bytes of the targets of each document of a text; `cluster` is the number of the cluster of
    each document, by default its own."""

    def __init__(self, documents: int, cluster: np.ndarray | None = None):
        self.nats, self.tokens, self.bytes = (np.zeros(documents) for _ in range(3))
        self.cluster = cluster

    def add(self, document: int, nats: float, tokens: int, size: int) -> None:
        self.nats[document] += nats
        self.tokens[document] += tokens
        self.bytes[document] += size

    def add_targets(self, document: np.ndarray, nats: np.ndarray, sizes: np.ndarray) -> None:
        """Add single targets: the document, nats and bytes of each."""
        for total, values in ((self.nats, nats), (self.tokens, None), (self.bytes, sizes)):
            total += np.bincount(document, values, minlength=len(total))

    @property
    def documents(self) -> int:
        """The number of documents with targets."""
        return int(np.count_nonzero(self.tokens))

    @property
    def clusters(self) -> int:
        """The number of clusters of documents with targets."""
        return int(np.count_nonzero(self._by_cluster(self.tokens)))

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
        return self._error(self.nats, self.tokens)

    @property
    def bits_error(self) -> float:
        """Standard error of the bits per byte."""
        return self._error(self.nats / math.log(2), self.bytes)

    def bits_error_from(self, other: "Sums") -> float:
        """Return the standard error of the change in bits per byte from other sums of the same targets."""
        return self._error((self.nats - other.nats) / math.log(2), self.bytes)

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
        return Estimate(float(more.sum() / tokens) if tokens else math.nan, self._error(more, self.tokens))

    def _error(self, above: np.ndarray, below: np.ndarray) -> float:
        return error_of_ratio(self._by_cluster(above), self._by_cluster(below))

    def _by_cluster(self, values: np.ndarray) -> np.ndarray:
        return values if self.cluster is None else np.bincount(self.cluster, values)


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


class Clusters(NamedTuple):
    """The clusters of the documents of a text."""

    field: str
    number: np.ndarray  # (documents,) of the cluster of each


def clusters_by(field: str, documents: Sequence[Mapping[str, Any]]) -> Clusters:
    """Return the clusters of documents with the same value of a field; one without a value is its own cluster."""
    values = [_value(field, fields) for fields in documents]
    keys = [index if value is None else repr(value) for index, value in enumerate(values)]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return Clusters(field, np.array([numbers[key] for key in keys], dtype=np.int64))


def _value(field: str, fields: Mapping[str, Any]) -> Any:
    if field in fields:
        return fields[field]
    if field == "author" and "file" in fields:
        return fields["file"].split("-")[0].split(".")[0]
    names = [*fields, *(["author"] if "file" in fields else [])]
    listed = f"only {', '.join(names)}" if names else "and no other field"
    raise UsageError(f"--cluster-by: a document has no field {field!r}, {listed}.{nearest(field, names)}")
