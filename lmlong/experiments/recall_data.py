"""Multi-query associative recall (Arora et al. 2023): keys, each with its value, and later the keys again as queries.

R rows, T tokens, P pairs.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lmlong.model.loss import IGNORED

FILLER = 0
"""The token at positions that hold no pair and no query."""

POWER = -0.99
"""The exponent by which queries get rarer with the distance from the pairs: most are near, some far."""


class RecallBatch(NamedTuple):
    """Rows of pairs and queries; the target of a queried key is the value it was paired with."""

    tokens: Tensor  # (R, T)
    targets: Tensor  # (R, T), IGNORED but at the queries


def keys(vocabulary: int) -> range:
    """Return the tokens that may be keys: the first half without the filler."""
    return range(FILLER + 1, vocabulary // 2)


def values(vocabulary: int) -> range:
    """Return the tokens that may be values: the second half."""
    return range(vocabulary // 2, vocabulary)


def make_batch(rows: int, pairs: int, length: int, vocabulary: int, seed: int, step: int) -> RecallBatch:
    """Return rows of `length` tokens, at least four for each pair: a function of the arguments alone.

    The pairs come first. In the rest every second place may hold a query, so that what follows a query is a filler and
    never tells the answer; each key is asked for once.
    """
    assert 4 * pairs <= length
    draw = np.random.default_rng((seed, step, pairs))
    chosen_keys, chosen_values = (_distinct(draw, rows, pairs, of) for of in (keys(vocabulary), values(vocabulary)))
    tokens = np.full((rows, length), FILLER)
    targets = np.full((rows, length), IGNORED)
    tokens[:, 0 : 2 * pairs : 2], tokens[:, 1 : 2 * pairs : 2] = chosen_keys, chosen_values
    positions = 2 * pairs + 2 * _spread(draw, rows, pairs, (length - 2 * pairs) // 2)
    np.put_along_axis(tokens, positions, chosen_keys, axis=1)
    np.put_along_axis(targets, positions, chosen_values, axis=1)
    return RecallBatch(torch.from_numpy(tokens), torch.from_numpy(targets))


def _distinct(draw: np.random.Generator, rows: int, count: int, of: range) -> np.ndarray:
    """Draw `count` different tokens for each row."""
    return np.asarray(of)[draw.random((rows, len(of))).argsort(axis=1)[:, :count]]


def _spread(draw: np.random.Generator, rows: int, count: int, positions: int) -> np.ndarray:
    """Draw `count` different positions for each row by the power law.

    The largest of log weight + Gumbel noise are such a draw.
    """
    weights = POWER * np.log(np.arange(1, positions + 1))
    return (-weights - draw.gumbel(size=(rows, positions))).argsort(axis=1)[:, :count]


class RecallScore(NamedTuple):
    """The number of queries, and of right answers."""

    right: int
    asked: int

    @property
    def accuracy(self) -> float:
        return self.right / self.asked

    def __add__(self, other: "RecallScore") -> "RecallScore":  # type: ignore[override]  # sums, not a longer tuple
        return RecallScore(self.right + other.right, self.asked + other.asked)


def score_answers(answers: Tensor, targets: Tensor) -> RecallScore:
    """Score answers (R, T) at the queries; answers elsewhere do not count."""
    asked = targets != IGNORED
    return RecallScore(int((answers == targets)[asked].sum()), int(asked.sum()))
