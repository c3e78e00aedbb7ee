"""Batches for Lightning: each is a function of its number, so the number is all there is to save."""

from collections.abc import Iterator

import torch
from torch import Tensor

from lmlong.text.batches import Arrays, TrainingBatches

ENDLESS = 10**9
"""A length, which Lightning needs in order not to fetch one batch ahead, and so lose it on a resume."""


class Loader:
    """Batches from `first` on, without end."""

    def __init__(self, batches: TrainingBatches, first: int, rank: int, ranks: int):
        self.batches, self.first, self.rank, self.ranks = batches, first, rank, ranks

    def __len__(self) -> int:
        return ENDLESS

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for number in range(self.first, ENDLESS):
            yield as_tensors(self.batches.batch(number, self.rank, self.ranks))


def as_tensors(batch: Arrays) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, targets and marks as tensors that share the arrays' memory."""
    tokens, targets, marks = map(torch.from_numpy, batch)
    return tokens, targets, marks
