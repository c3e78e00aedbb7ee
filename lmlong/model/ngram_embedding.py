"""Tables of trained vectors, found by the hash of the last n tokens.

The n-gram heads of attention find what followed the last tokens in this document. A table learns from all training text
which tokens follow which.

B batch, T time, O orders (values of n), R rows of an order, W width of a row, N looked-up rows.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding, embedding_bag, pad

from lmlong import recipe
from lmlong.attention.ngram.hashing import NO_NGRAM, ngram_hashes, row_of
from lmlong.model.layers import Linear

JOINED_AT = 1 << 17
"""Number of gradients of rows from which on those of the same row are summed, before the step needs their sum."""


class RowGradient(NamedTuple):
    """Gradients of some rows of a table."""

    rows: Tensor  # (N,) their numbers, in which a row may occur several times
    gradient: Tensor  # (N, W)


class RowGradients:
    """The gradients of the rows that were looked up since the last optimizer step, as `grad` is of a parameter.

    `rows` is the number of rows in the table. `reads_values`: whether the number of different rows may be read.
    """

    def __init__(self, rows: int, reads_values: bool):
        self.rows, self.reads_values = rows, reads_values
        self.pieces: list[RowGradient] = []
        self.unjoined = 0  # gradients added since they were last joined

    def add(self, rows: Tensor, gradient: Tensor) -> None:
        """Add the gradients (..., W) of some rows (...)."""
        self.pieces.append(RowGradient(rows.flatten(), gradient.flatten(0, -2)))
        self.unjoined += rows.numel()
        if self.unjoined >= JOINED_AT:
            joined = self.take()
            self.pieces = [joined]

    def take(self) -> RowGradient:
        """Return the sum of the gradients of each row, and remove all gradients. There is at least one."""
        pieces, self.pieces, self.unjoined = self.pieces, [], 0
        joined = RowGradient(*(torch.cat(parts) for parts in zip(*pieces, strict=True)))
        return sum_rows(joined, self.rows, self.reads_values)


def sum_rows(piece: RowGradient, most: int, reads_values: bool) -> RowGradient:
    """Return the sum of the gradients of each row, added in their order. There are at most `most` different rows.

    Unless `reads_values`, their number is not read: the result may have further gradients, of 0, for the last row.
    """
    rows, order = piece.rows.sort(stable=True)
    is_first = torch.cat([rows.new_ones(1, dtype=torch.bool), rows[1:] != rows[:-1]])
    number = is_first.cumsum(0) - 1  # of the row among the different rows
    size = int(number[-1]) + 1 if reads_values else min(len(rows), most)
    # where the gradients of each row begin in their order; further rows have none
    begin = torch.full((size + 1,), len(rows), device=rows.device)
    begin = begin.scatter_(0, number.where(is_first, size), torch.arange(len(rows), device=rows.device))[:size]
    return RowGradient(rows[begin.clamp_max(len(rows) - 1)], embedding_bag(order, piece.gradient, begin, mode="sum"))


class NgramEmbedding(nn.Module):
    """The sum of projected vectors of the last n tokens, one for each n.

    The table is a buffer, not a parameter: a training step reads and changes only the rows that its tokens find
    (lmlong.training.row_adagrad). All ranks hold all of it.
    """

    table: Tensor
    """The rows (O R, W) of all orders."""
    gradients: RowGradients | None = None
    """Where the backward pass puts the gradients of rows; None if the table is not trained."""

    def __init__(self, options: recipe.NgramEmbedding, width: int):
        super().__init__()
        self.orders, self.rows = options.orders, options.rows
        count = len(self.orders)
        self.register_buffer("table", torch.zeros(count * self.rows, options.width))
        self.projection = Linear(count * options.width, width)

    @property
    def past_tokens(self) -> int:
        """The tokens before the current one that are hashed."""
        return max(self.orders) - 1

    def forward(self, last_tokens: Tensor) -> Tensor:
        """Return vectors (B, T, width). `last_tokens` (B, T, P) are the last tokens at each token, -1 before the start
        of the document, where an order finds no row: its vector is 0."""
        hashes = ngram_hashes(pad(last_tokens, (1, 0), value=-1), self.orders)[..., 1]
        first = torch.arange(0, len(self.table), self.rows, device=hashes.device)[:, None]  # row of each order
        rows = row_of(hashes.clamp_min(0), self.rows) + first  # (B, O, T)
        vectors = self._look_up(rows.mT).masked_fill((hashes == NO_NGRAM).mT[..., None], 0)
        return self.projection(vectors.flatten(2))

    def _look_up(self, rows: Tensor) -> Tensor:
        """Return the vectors (..., W) of some rows (...)."""
        gradients = self.gradients
        if gradients is None or not (torch.is_grad_enabled() and self.projection.weight.requires_grad):
            return embedding(rows, self.table)
        return _Vectors.apply(self.projection.weight, rows, self.table, gradients)  # type: ignore[no-any-return]


def tables_of(model: nn.Module) -> NgramEmbedding | None:
    """Return the tables of a model; None if it has none."""
    return next((module for module in model.modules() if isinstance(module, NgramEmbedding)), None)


class _Vectors(torch.autograd.Function):
    """Rows of a table that is not a part of the graph. The weight of the projection is: if it is frozen, so is the
    table, and a backward pass to it always comes here."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, rows: Tensor, table: Tensor, gradients: RowGradients) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.gradients = gradients
        return embedding(rows, table)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        (rows,) = ctx.saved_tensors
        ctx.gradients.add(rows, gradient)
        return None, None, None, None
