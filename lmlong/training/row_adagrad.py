"""Row-wise Adagrad for the tables of n-gram embeddings: a step reads and changes only the rows that its tokens found.

The gradients of rows are scaled as all others are: the mean over ranks of the sums over accumulated batches. But they
are not a part of the gradient's norm, and are not clipped: a step of Adagrad does not depend on their scale.

N rows, W width of a row.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from lmlong.model.base import TextModel
from lmlong.model.ngram_embedding import NgramEmbedding, RowGradient, RowGradients, sum_rows, tables_of
from lmlong.model.sequence_group import all_gather

LEARNING_RATE = 0.1
"""The learning rate at the peak of the run's schedule."""

EPSILON = 1e-10
"""Added to the root that gradients are divided by, as in torch's Adagrad: a gradient that is only a rounding error must
not become a whole step."""


class RowAdagrad:
    """The optimizer of a table. Each row has one number: the sum of the mean squares of its gradients."""

    def __init__(self, tables: NgramEmbedding, reads_values: bool, ranks: int = 1):
        self.tables, self.ranks = tables, ranks
        self.gradients = tables.gradients = RowGradients(len(tables.table), reads_values)
        self.squares: Tensor | None = None  # of each row; None before the first step
        self.looked_up = 0  # rows that a rank looked up since the last step, at most

    def expect(self, tokens: int) -> None:
        """Count the most tokens that any rank reads in a batch: ranks exchange as many gradients, without reading how
        many there are."""
        self.looked_up += tokens * len(self.tables.orders)

    @torch.no_grad()
    def step(self, factor: float = 1.0, is_skipped: Tensor | None = None, scale: float = 1.0) -> None:
        """Update the rows looked up since the last step, unless it `is_skipped` or a gradient is not finite.

        `factor` is the share of the peak of the learning rate, `scale` that of float16's gradient scaler. All ranks
        call this, and make the same update.
        """
        most, self.looked_up = min(self.looked_up, len(self.tables.table)), 0
        if not self.gradients.pieces:  # the weights are frozen
            return
        found = self.gradients.take()
        if self.ranks > 1:
            found = self._sum_over_ranks(found, most)
        rows, gradient = found.rows, found.gradient / (self.ranks * scale)
        is_finite = gradient.isfinite().all()
        gradient = gradient.where(is_finite if is_skipped is None else is_finite & ~is_skipped, 0)
        if self.squares is None:
            self.squares = gradient.new_zeros(len(self.tables.table))
        self.squares.index_add_(0, rows, gradient.square().mean(1))
        size = self.squares[rows].sqrt() + EPSILON
        self.tables.table.index_add_(0, rows, gradient / size[:, None], alpha=-LEARNING_RATE * factor)

    def _sum_over_ranks(self, own: RowGradient, most: int) -> RowGradient:
        """Return the sum of the gradients of each row over the ranks, the same on each of them. A rank has up to `most`
        gradients, and adds gradients of 0 up to this number."""
        missing = most - len(own.rows)
        own = RowGradient(torch.cat([own.rows, own.rows[-1:].expand(missing)]), pad(own.gradient, (0, 0, 0, missing)))
        every = RowGradient(*(x.new_empty(self.ranks * most, *x.shape[1:]) for x in own))
        for gathered, x in zip(every, own, strict=True):
            all_gather(gathered, x)
        return sum_rows(every, len(self.tables.table), self.gradients.reads_values)


def make_row_optimizer(model: TextModel, reads_values: bool, ranks: int = 1) -> RowAdagrad | None:
    """Return the optimizer of a model's tables; None if it has none."""
    tables = tables_of(model)
    return None if tables is None else RowAdagrad(tables, reads_values, ranks)
