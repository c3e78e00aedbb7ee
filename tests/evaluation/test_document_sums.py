"""Ratios of sums, and their standard errors over documents."""

import math

import numpy as np
import pytest

from lmlong.evaluation.document_sums import Sums, error_of_ratio


def test_the_error_counts_a_document_that_is_most_of_the_text() -> None:
    nats, tokens = np.array([300.0, 22.0, 19.0, 24.0, 18.0]), np.array([100.0, 5.0, 5.0, 5.0, 5.0])
    ratios = [np.delete(nats, one).sum() / np.delete(tokens, one).sum() for one in range(5)]
    jackknife = math.sqrt(4 / 5 * sum((ratio - np.mean(ratios)) ** 2 for ratio in ratios))
    assert error_of_ratio(nats, tokens) == pytest.approx(jackknife)
    assert error_of_ratio(np.append(nats, 0), np.append(tokens, 0)) == pytest.approx(jackknife)
    assert math.isnan(error_of_ratio(nats[:1], tokens[:1]))


def test_differences_are_taken_document_by_document() -> None:
    one, other = Sums(3), Sums(3)
    for document, (mine, others) in enumerate([(9.0, 8.0), (90.0, 89.0), (19.0, 18.0)]):
        one.add(document, mine, 10, 5)
        other.add(document, others, 10, 5)
    change, error = one.above(other)
    assert (change, error) == (pytest.approx(0.1), pytest.approx(0.0, abs=1e-15))
    assert one.nats_error > 1  # the documents themselves differ by far more
    assert (one.documents, one.totals.tokens, one.totals.bytes) == (3, 30, 15)
    with pytest.raises(AssertionError, match="not the same targets"):
        one.above(Sums(3))
