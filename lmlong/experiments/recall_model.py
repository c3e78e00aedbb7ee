"""The models of the recall experiment: options, training and scores."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lmlong import recipe
from lmlong.errors import UsageError
from lmlong.experiments.compare import candidates
from lmlong.experiments.recall_data import RecallBatch, RecallScore, make_batch, score_answers
from lmlong.experiments.recall_grid import RecallGrid
from lmlong.experiments.trainer import fit, seeded
from lmlong.model.language_model import LanguageModel
from lmlong.recipe.overrides import with_override

LAYERS = 2

TESTS = 16
"""Batches a model is scored on: those that would follow its last step."""


def recall_options(name: str, width: int) -> recipe.Model:
    """Return a candidate in two layers of one head, so that its state is as wide as the model.

    A window is as long as makes its state that of linear attention. Positions are left out: what belongs together
    stands side by side, where the short convolution sees it, and all else may stand anywhere.
    """
    values: dict[str, Any] = {}
    for option in [*candidates()[name], f"window={1 + width // 2}"]:
        values = with_override(values, option)
    attention = recipe.Attention.model_validate(values)
    if not isinstance(attention.kind, str) and len(attention.kind) > LAYERS:
        raise UsageError(
            f"--only: '{name}' is a pattern of {len(attention.kind)} layers, and the models here have {LAYERS}. "
            "Leave it out."
        )
    return recipe.Model(width=width, layers=LAYERS, heads=1, positions="none", attention=attention)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread: in products this small, threads on a busy machine mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def train_recall(grid: RecallGrid, options: recipe.Model, learning_rate: float, seed: int) -> LanguageModel:
    """Return a model trained on all numbers of pairs in each step."""
    model = seeded(seed, lambda: LanguageModel(options, grid.vocabulary))
    fit(model, lambda step: [pairs_batch(grid, pairs, seed, step) for pairs in grid.pairs], grid.steps, learning_rate)
    return model


def recall_scores(answer: Callable[[Tensor], Tensor], grid: RecallGrid, seed: int) -> dict[int, RecallScore]:
    """Return by number of pairs how many queries `answer` (tokens -> tokens) gets right, on rows not trained on."""
    return {
        pairs: sum(
            (
                score_answers(answer(batch.tokens), batch.targets)
                for batch in (pairs_batch(grid, pairs, seed, grid.steps + test) for test in range(TESTS))
            ),
            RecallScore(0, 0),
        )
        for pairs in grid.pairs
    }


def pairs_batch(grid: RecallGrid, pairs: int, seed: int, step: int) -> RecallBatch:
    """Return the rows of one step with so many pairs; the more pairs, the fewer rows."""
    rows = -(-grid.queries // pairs)
    return make_batch(rows, pairs, grid.tokens_per_pair * pairs, grid.vocabulary, seed, step)


@torch.inference_mode()
def answers_of(model: LanguageModel, tokens: Tensor) -> Tensor:
    """Return the likeliest next token after each token."""
    hidden, _ = model.hidden_states(tokens.to(model.embedding.weight.device))
    return model.logits(hidden).argmax(-1).to(tokens.device)
