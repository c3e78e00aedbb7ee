"""A cache of counts: how much the counts of the document's n-grams improve the predictions of a model.

The orders are mixed one after the other (Jelinek and Mercer):
    p_n = (1 - w_n) p_(n-1) + w_n c(history, target) / c(history)
p_0 is the model's probability of the target, a history is n - 1 tokens, and the weight w_n is one number for each
bucket of c(history), fitted by EM. Of the model only the probability of the target is needed.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lmlong.evaluation.spans import Documents, Targets

HIGHEST = 3
"""The highest order: trigrams."""

BUCKETS = 8
"""Number of buckets of c(history): 0, 1, 2 to 3, 4 to 7 and so on."""

ROUNDS = 100
"""Iterations of EM, more than it takes to converge."""


class Counts(NamedTuple):
    """The counts of the n-grams of one order that end in the targets, among the tokens before each."""

    ngram: np.ndarray  # (targets,) occurrences of the history followed by the target
    history: np.ndarray  # (targets,) occurrences of the history followed by any token


def count_ngrams(
    text: np.ndarray, documents: Documents, targets: Targets, begins: Sequence[np.ndarray]
) -> list[list[Counts]]:
    """Return for each window the counts of orders 1 to HIGHEST. A window has the tokens of the target's document from
    its begin (targets,) up to the target; an n-gram counts if all of it is inside."""
    size = len(targets.position)
    counts = [[Counts(*np.zeros((2, size), np.int64)) for _ in range(HIGHEST)] for _ in begins]
    for document in np.unique(targets.document):
        inside = np.flatnonzero(targets.document == document)
        start = documents.begins[document]
        ids = _ngram_ids(np.asarray(text[start : documents.ends[document]]))
        index = targets.position[inside] - start
        for order in range(1, HIGHEST + 1):
            before = _shifted(ids[order - 1])
            whole, history = _Occurrences(ids[order]), _Occurrences(before)
            for of_window, begin in zip(counts, begins, strict=True):
                first = np.maximum(begin[inside] - start, 0) + order - 1  # where an n-gram can end
                complete = index >= first  # whether the window has the history of the target
                ngram = whole.between(ids[order][index], first, index)
                with_any = history.between(before[index], first, index)
                of_window[order - 1].ngram[inside] = np.where(complete, ngram, 0)
                of_window[order - 1].history[inside] = np.where(complete, with_any, 0)
    return counts


def _ngram_ids(tokens: np.ndarray) -> list[np.ndarray]:
    """Return for orders 0 to HIGHEST an id at each index, equal for equal n-grams that end there."""
    ids = [np.zeros(len(tokens), np.int64)]
    for _ in range(HIGHEST):
        ids.append(np.unique(_shifted(ids[-1]) * (int(tokens.max()) + 1) + tokens, return_inverse=True)[1].reshape(-1))
    return ids


def _shifted(ids: np.ndarray) -> np.ndarray:
    """Return the ids of the n-grams that end one index before; the first has none, and is never counted."""
    return np.concatenate([[0], ids[:-1]])


class _Occurrences:
    """The indices of each id, to count the occurrences between two indices."""

    def __init__(self, ids: np.ndarray):
        order = np.argsort(ids, kind="stable")
        self.step = len(ids) + 1
        self.keys = ids[order] * self.step + order

    def between(self, ids: np.ndarray, first: np.ndarray, end: np.ndarray) -> np.ndarray:
        """Return how often each id occurs from `first` to before `end`."""
        low, high = (np.searchsorted(self.keys, ids * self.step + index) for index in (first, end))
        return np.maximum(high - low, 0)


def fit(nats: np.ndarray, counts: Sequence[Counts]) -> np.ndarray:
    """Return the weights (orders, BUCKETS) of the best mixture of a model with some orders of counts."""
    weights = np.full((len(counts), BUCKETS), 0.1)
    buckets = [_bucket(each) for each in counts]
    for _ in range(ROUNDS):
        steps = _mixed(nats, counts, weights)
        reached = np.ones(len(nats))  # chance that the token was drawn from this order or one below
        for order in reversed(range(len(counts))):
            from_counts = np.exp(_log_share(weights[order][buckets[order]], counts[order]) - steps[order + 1])
            drawn, among = (np.bincount(buckets[order], values, BUCKETS) for values in (reached * from_counts, reached))
            weights[order] = drawn / (among + 1)  # one pseudo-count for the order below keeps weights under 1
            reached = reached * (1 - from_counts)
    return weights


def mix(nats: np.ndarray, counts: Sequence[Counts], weights: np.ndarray) -> np.ndarray:
    """Return -log p of targets under the mixture."""
    return -_mixed(nats, counts, weights)[-1]


def _mixed(nats: np.ndarray, counts: Sequence[Counts], weights: np.ndarray) -> list[np.ndarray]:
    """Return log p of the targets: the model's, then with each order mixed in."""
    steps = [-nats]
    for each, weight in zip(counts, weights, strict=True):
        chosen = weight[_bucket(each)]
        steps.append(np.logaddexp(np.log1p(-chosen) + steps[-1], _log_share(chosen, each)))
    return steps


def _log_share(weight: np.ndarray, counts: Counts) -> np.ndarray:
    """Return the logarithm of the share of the counts in the mixture."""
    with np.errstate(divide="ignore"):
        return np.log(weight * counts.ngram / np.maximum(counts.history, 1))


def _bucket(counts: Counts) -> np.ndarray:
    return np.minimum(np.frexp(counts.history)[1], BUCKETS - 1)
