"""The training batches of one rank, as tensors, with all that is known of them before they are on the device."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lmlong.data.shuffle import draw
from lmlong.model.loss import IGNORED
from lmlong.model.metrics import LossTotals, batch_tensors
from lmlong.model.sequence_group import part_of
from lmlong.training.prepare import PreparedRun

PASSED = 1
"""Part of the random key that selects the rows of `state_passing`."""


class TrainingBatch(NamedTuple):
    """A batch of one rank, and the counts of its targets. Counted on a GPU, they would have to be waited for."""

    tokens: Tensor  # (rows, time)
    targets: Tensor  # (rows, time)
    mask: Tensor  # (rows, time) document starts or padding
    passed: Tensor | None  # (rows,) whether a row begins with the state after the previous batch (`state_passing`)
    scored: int  # targets, of the part that this rank reads
    bytes: int  # of these targets

    @property
    def counts(self) -> LossTotals:
        """The totals of the batch, without its loss."""
        return LossTotals(0.0, self.scored, self.bytes)

    def pinned(self) -> "TrainingBatch":
        """Return the batch in memory that a GPU can read while it computes."""
        return TrainingBatch._make(part.pin_memory() if isinstance(part, Tensor) else part for part in self)


class Loader:
    """The batches of these numbers, for one rank; ranks that read parts of the same rows have the same batches."""

    def __init__(self, prepared: PreparedRun, numbers: range, rank: int):
        self.recipe, self.batches, self.numbers = prepared.recipe, prepared.data.training(), numbers
        self.parts = prepared.recipe.training.sequence_parallel
        self.group, self.part = divmod(rank, self.parts)
        self.token_bytes = prepared.tokens.tokenizer.token_bytes
        self.is_pinned = prepared.device.type == "cuda"  # otherwise a copy to the GPU waits for all of its work

    def __len__(self) -> int:  # without a length, Lightning would prefetch a batch
        return len(self.numbers)

    def __iter__(self) -> Iterator[TrainingBatch]:
        for number in self.numbers:
            arrays = self.batches.batch(number, self.group, self.recipe.batches_at_once)
            targets = arrays[1][:, part_of(arrays[1].shape[1], self.part, self.parts)]
            targets = targets[targets != IGNORED]
            size = 0 if self.recipe.objective == "label" else int(self.token_bytes[targets].sum())
            passed = self._passed(number, len(arrays[0]))
            batch = TrainingBatch(*batch_tensors(arrays), passed, len(targets), size)
            yield batch.pinned() if self.is_pinned else batch

    def _passed(self, number: int, rows: int) -> Tensor | None:
        """Draw the rows of a batch that begin with a passed state, by batch and row."""
        share, first = self.recipe.training.state_passing, self.group * rows
        if not share:
            return None
        draws = (draw(self.recipe.seed, PASSED, number, first + row) for row in range(rows))
        return torch.tensor([drawn < share * 2**64 for drawn in draws])
