"""The figures of training steps. They stay on the device until those of several steps are fetched at once, since a GPU
would stand idle after each fetch."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lmlong.model.metrics import LossTotals


class BatchFigures(NamedTuple):
    """The loss of a batch."""

    number: int  # of the batch
    counts: LossTotals  # of its targets, without their loss
    loss: Tensor  # to minimize
    nll: Tensor  # to report


class StepFigures(NamedTuple):
    """The figures of an optimizer step."""

    step: int
    learning_rate: float
    batches: list[BatchFigures]
    gradient_norm: Tensor
    skipped: Tensor  # consecutive steps skipped so far

    def tensors(self) -> Iterator[Tensor]:
        for batch in self.batches:
            yield batch.loss
            yield batch.nll
        yield self.gradient_norm
        yield self.skipped


class FetchedFigures(NamedTuple):
    """The figures of an optimizer step as numbers."""

    step: int
    learning_rate: float
    losses: dict[int, float]  # to minimize, by the number of the batch
    totals: LossTotals
    gradient_norm: float
    skipped: int


def fetch(steps: Sequence[StepFigures]) -> list[FetchedFigures]:
    """Return the figures of steps as numbers. This waits for the device, once."""
    values = iter(torch.stack([tensor for figures in steps for tensor in figures.tensors()]).tolist())
    return [_from_values(figures, values) for figures in steps]


def _from_values(figures: StepFigures, values: Iterator[float]) -> FetchedFigures:
    """Return the figures of a step, given the values of its tensors."""
    losses, totals = {}, LossTotals()
    for batch in figures.batches:
        losses[batch.number] = next(values)
        totals += batch.counts + LossTotals(next(values))
    norm, skipped = next(values), next(values)
    return FetchedFigures(figures.step, figures.learning_rate, losses, totals, norm, int(skipped))
