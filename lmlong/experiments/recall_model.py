"""Multi-query associative recall (Arora et al. 2023): keys, each with its value, and later the keys again as queries.

The rows of the task, and the models that are trained on it. R rows, T tokens, P pairs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lmlong import recipe
from lmlong.errors import UsageError
from lmlong.experiments.recall_grid import RecallGrid
from lmlong.experiments.trainer import Batch, fit, seeded
from lmlong.model.language_model import LanguageModel
from lmlong.model.loss import IGNORED
from lmlong.recipe.candidates import candidates

LAYERS = 2

TESTS = 16
"""Number of batches in the test: those after the last training step."""

FILLER = 0
"""The token at positions without a pair or a query."""

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
    """Return rows of `length` tokens, at least four for each pair, which depend on the arguments alone.

    The pairs come first. In the rest every second position may hold a query, so that a query is followed by a filler
    and never by its answer; each key is queried once.
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
    """The number of queries in rows of some pairs, and of right answers."""

    pairs: int
    right: int
    asked: int

    @property
    def accuracy(self) -> float:
        return self.right / self.asked


def recall_options(name: str, width: int) -> recipe.Model:
    """Return the options of a candidate in two layers of one head, so that its state is as wide as the model.

    A window has the length at which its state is as large as that of linear attention. There are no position
    encodings: a key and its value are adjacent, where the short convolution sees both, and pairs may be anywhere.
    """
    attention = recipe.Attention.model_validate({**candidates()[name], "window": 1 + width // 2})
    if not isinstance(attention.kind, str) and len(attention.kind) > LAYERS:
        raise UsageError(
            f"--only: '{name}' is a pattern of {len(attention.kind)} layers, and the models here have {LAYERS}. "
            "Leave it out."
        )
    return recipe.Model(width=width, layers=LAYERS, heads=1, positions="none", attention=attention)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread: for products this small, more threads mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def train_recall(grid: RecallGrid, options: recipe.Model, learning_rate: float, seed: int) -> LanguageModel:
    """Return a model trained on every number of pairs in each step."""
    model = seeded(seed, lambda: LanguageModel(options, grid.vocabulary))

    def batches(step: int) -> list[Batch]:
        return [pairs_batch(grid, pairs, seed, step) for pairs in grid.pairs]

    fit(model, batches, grid.steps, learning_rate, "training")
    return model


def recall_scores(answer: Callable[[Tensor], Tensor], grid: RecallGrid, seed: int) -> list[RecallScore]:
    """Return for each number of pairs how many queries `answer` (tokens -> tokens) gets right on rows of the test."""
    scores = []
    for pairs in grid.pairs:
        right = asked = 0
        for test in range(TESTS):
            tokens, targets = pairs_batch(grid, pairs, seed, grid.steps + test)
            right += int((answer(tokens) == targets)[targets != IGNORED].sum())
            asked += int((targets != IGNORED).sum())
        scores.append(RecallScore(pairs, right, asked))
    return scores


def pairs_batch(grid: RecallGrid, pairs: int, seed: int, step: int) -> RecallBatch:
    """Return the rows of one step with this number of pairs; the more pairs, the fewer rows."""
    rows = -(-grid.queries // pairs)
    return make_batch(rows, pairs, grid.tokens_per_pair * pairs, grid.vocabulary, seed, step)


@torch.inference_mode()
def answers_of(model: LanguageModel, tokens: Tensor) -> Tensor:
    """Return the likeliest next token after each token."""
    hidden, _ = model.hidden_states(tokens.to(model.embedding.weight.device))
    return model.logits(hidden).argmax(-1).to(tokens.device)
