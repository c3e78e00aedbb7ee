"""Counts against counting by hand, and weights against sources where the best are known."""

import math

import numpy as np
import pytest

from lmlong.evaluation.count_cache import Counts, count_ngrams, fit, mix
from lmlong.evaluation.spans import Documents, Targets

RANDOM = np.random.default_rng(0)


def by_hand(tokens: list[int], order: int, begin: int, place: int) -> tuple[int, int]:
    """How often the n-gram that ends at a place, and its history, were inside the window before."""
    if place - order + 1 < begin:
        return 0, 0
    history = tokens[place - order + 1 : place]
    ends = [end for end in range(begin + order - 1, place) if tokens[end - order + 1 : end] == history]
    return sum(tokens[end] == tokens[place] for end in ends), len(ends)


def test_counts_are_those_by_hand() -> None:
    text = RANDOM.integers(4, size=150)
    documents = Documents(np.array([0, 70]), np.array([70, 150]))
    place = np.concatenate([np.arange(0, 70), np.arange(70, 150)])
    document = np.repeat([0, 1], [70, 80])
    starts = documents.begins[document]
    windows = [starts, np.maximum(starts, place - 20), np.maximum(starts, place - 1), place]
    found = count_ngrams(text, documents, Targets(document, place, starts), windows)
    for begins, counts in zip(windows, found, strict=True):
        for order, (ngram, history) in enumerate(counts, 1):
            expected = [by_hand(text.tolist(), order, *at) for at in zip(begins.tolist(), place.tolist(), strict=True)]
            assert list(zip(ngram.tolist(), history.tolist(), strict=True)) == expected


def test_weights_are_those_that_the_targets_were_drawn_by() -> None:
    """Of targets with a known history, 0.7 are drawn from the counts, which give each of 4 tokens a quarter, and
    others from a model that gives each of 1,000 a thousandth; without history all are the model's."""
    history = np.repeat([0, 4], 20_000)
    drawn = RANDOM.random(40_000) < 0.7 * (history > 0)
    counts = [Counts(drawn.astype(np.int64), history)]
    nats = np.full(40_000, math.log(1000))
    weights = fit(nats, counts)
    # the targets drawn from the model are never among the four here
    assert weights[0, 0] == 0
    assert weights[0, 3] == pytest.approx(0.7, abs=0.01)
    gained = (nats - mix(nats, counts, weights))[history > 0].mean()
    share = drawn[history > 0].mean()
    best = share * math.log((0.7 / 4 + 0.3 / 1000) * 1000) + (1 - share) * math.log(0.3)
    assert gained == pytest.approx(best, abs=1e-3)


def test_counts_that_tell_nothing_gain_nothing() -> None:
    nats = RANDOM.uniform(0.5, 3, size=5000)
    never = [Counts(np.zeros(5000, np.int64), np.full(5000, 9)), Counts(*np.zeros((2, 5000), np.int64))]
    assert mix(nats, never, fit(nats, never)) == pytest.approx(nats, abs=1e-6)
    unlikely = np.full(5000, 2000.0)  # of a probability below the smallest float
    assert np.isfinite(mix(unlikely, never[:1], fit(nats, never[:1]))).all()
