"""One small model of the recall experiment: its options, its training, its measurement."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from lmlong import recipe
from lmlong.bench.compare import CONTESTANTS
from lmlong.bench.recall_data import Questions, Score, ask, score
from lmlong.bench.recall_grid import Grid
from lmlong.errors import UsageError
from lmlong.model.device import pick_device
from lmlong.model.language_model import LanguageModel
from lmlong.recipe.overrides import parse, place
from lmlong.training.optimizer import make_optimizer, make_schedule

LAYERS = 2

TESTS = 16
"""Batches a model is measured on: those that would have come after its last step."""


def model_options(name: str, width: int) -> recipe.Model:
    """A contestant in two layers of one head, so that its state is as wide as the model.

    A window is as long as makes its state that of linear attention. Positions are left out: what belongs together
    stands side by side, where the short convolution sees it, and all else may stand anywhere.
    """
    values: dict[str, Any] = {}
    for option in [*CONTESTANTS[name], f"window={1 + width // 2}"]:
        values = place(values, parse(option))
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


def train(grid: Grid, options: recipe.Model, rate: float, seed: int) -> LanguageModel:
    """A model that has seen every number of pairs in each step, in float32."""
    device = pick_device("auto")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LanguageModel(options, grid.vocabulary).to(device)
    course = recipe.Training(steps=grid.steps, learning_rate=rate, warmup_steps=max(grid.steps // 10, 1))
    optimizer = make_optimizer(model, course)
    schedule = make_schedule(optimizer, course, grid.steps)
    for step in tqdm(range(grid.steps), leave=False, disable=None):
        optimizer.zero_grad()
        for pairs in grid.pairs:
            tokens, targets = (part.to(device) for part in questions(grid, pairs, seed, step))
            nats, asked = model.loss(tokens, targets)
            (nats / asked / len(grid.pairs)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), course.clip)
        optimizer.step()
        schedule.step()
    return model


def measure(answer: Callable[[Tensor], Tensor], grid: Grid, seed: int) -> dict[int, Score]:
    """What `answer`, from tokens to tokens, gets right of questions that no step of training held, by pairs."""
    return {
        pairs: sum(
            (
                score(answer(asked.tokens), asked.targets)
                for asked in (questions(grid, pairs, seed, grid.steps + test) for test in range(TESTS))
            ),
            Score(0, 0),
        )
        for pairs in grid.pairs
    }


def questions(grid: Grid, pairs: int, seed: int, step: int) -> Questions:
    """The rows of one step with so many pairs; the more pairs, the fewer rows."""
    rows = -(-grid.queries // pairs)
    return ask(rows, pairs, grid.tokens_per_pair * pairs, grid.vocabulary, seed, step)


@torch.inference_mode()
def likeliest(model: LanguageModel, tokens: Tensor) -> Tensor:
    """The token that a model finds likeliest after each."""
    hidden, _ = model.read(tokens.to(model.embedding.weight.device))
    return model.logits(hidden).argmax(-1).to(tokens.device)
