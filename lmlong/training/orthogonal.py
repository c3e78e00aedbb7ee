"""Orthogonal directions of matrices (Newton-Schulz), computed by one process or divided among the ranks of a run.

The direction of a matrix U S Vᵀ is approximately U Vᵀ. Ranks divide whole matrices by the work that these need: each
computes the directions of its own, by the same function and so to the same bit, and sends them to the others.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, distributed

from lmlong.model.sequence_group import all_gather

COEFFICIENTS = (
    (8.3019, -24.0424, 17.4699),
    (4.0078, -2.9266, 0.5425),
    (3.4896, -2.5654, 0.5028),
    (2.4973, -1.8126, 0.4217),
)
"""Coefficients of x, x³ and x⁵ for each step: each polynomial has the least error on the range of the values before it,
widened by 1 % for rounding (Amsel et al., 2025). Singular values between 0.003 and 1 become values between 0.79 and
1.21."""


class DividedMatrix(NamedTuple):
    """A matrix whose numbers the ranks hold in turn: a long tensor is cut into spans of `span` numbers, one for each
    rank, and the matrix begins at `begin` of it. A rank keeps its span in its own flat tensor, at `offset`."""

    shape: tuple[int, int]
    begin: int
    span: int
    offset: int

    def held_by(self, rank: int) -> slice:
        """Return where the numbers of the matrix are that a rank holds, in the rank's own flat tensor."""
        begin = self.begin - rank * self.span
        first, last = (min(max(at, 0), self.span) for at in (begin, begin + self.shape[0] * self.shape[1]))
        return slice(self.offset + first, self.offset + last)


def orthogonal(matrices: Tensor) -> Tensor:
    """Return approximately U Vᵀ of matrices U S Vᵀ (N, height, width)."""
    height, width = matrices.shape[-2:]
    x = matrices.mT if height > width else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-7)
    for a, b, c in COEFFICIENTS:
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if height > width else x


def write_directions(matrices: Sequence[Tensor], targets: Sequence[Tensor], dtype: torch.dtype) -> None:
    """Write the directions of matrices into `targets`. They are computed in `dtype`, in batches of equal shapes."""
    shapes: dict[torch.Size, list[tuple[Tensor, Tensor]]] = {}
    for matrix, target in zip(matrices, targets, strict=True):
        shapes.setdefault(matrix.shape, []).append((matrix, target))
    for pairs in shapes.values():
        directions = orthogonal(torch.stack([matrix for matrix, _ in pairs]).to(dtype))
        for (_, target), direction in zip(pairs, directions, strict=True):
            target.copy_(direction)


def owned_by_rank(shapes: Sequence[Sequence[int]], ranks: int) -> list[list[int]]:
    """Return the numbers of the matrices whose directions each rank computes: the costliest first, each to the rank
    that has the least to do."""
    costs = [multiplications(shape) for shape in shapes]
    owned: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for number in sorted(range(len(shapes)), key=costs.__getitem__, reverse=True):
        rank = loads.index(min(loads))
        owned[rank].append(number)
        loads[rank] += costs[number]
    return owned


def multiplications(shape: Sequence[int]) -> int:
    """Return the multiplications of a matrix's direction."""
    short, long = sorted(shape)
    return len(COEFFICIENTS) * short * short * (2 * long + short)


def write_directions_by_ranks(
    matrices: Sequence[Tensor], targets: Sequence[Tensor], dtype: torch.dtype, ranks: int
) -> None:
    """Write the directions of matrices that are the same on all ranks into `targets`; all ranks call this."""
    shapes = [matrix.shape for matrix in matrices]
    owned = owned_by_rank(shapes, ranks)
    length = max(sum(shapes[number].numel() for number in numbers) for numbers in owned)
    own = matrices[0].new_zeros(length, dtype=dtype)
    every = own.new_empty(ranks * length)
    mine = owned[distributed.get_rank()]
    write_directions([matrices[number] for number in mine], _views(own, [shapes[number] for number in mine]), dtype)
    all_gather(every, own)
    for numbers, directions in zip(owned, every.split(length), strict=True):
        views = _views(directions, [shapes[number] for number in numbers])
        for number, direction in zip(numbers, views, strict=True):
            targets[number].copy_(direction)


def write_divided_directions(
    matrices: Sequence[DividedMatrix], flat: Tensor, target: Tensor, dtype: torch.dtype
) -> None:
    """Write the directions of matrices that are divided among the ranks into `target`, from the rank's own `flat`
    tensor; all ranks call this. A rank has only the matrices whole whose directions it computes."""
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    owned = owned_by_rank([matrix.shape for matrix in matrices], ranks)
    mine = [matrices[number] for number in owned[rank]]
    held = [[matrices[number].held_by(rank) for number in numbers] for numbers in owned]  # by owner
    sizes = [[_length(matrix.held_by(each)) for matrix in mine] for each in range(ranks)]  # of mine, by rank
    of_others, of_mine = [sum(map(_length, spans)) for spans in held], [sum(each) for each in sizes]

    received = flat.new_empty(sum(of_mine))
    sent = torch.cat([flat[span] for spans in held for span in spans])
    distributed.all_to_all_single(received, sent, of_mine, of_others)
    parts = [part.split(each) for part, each in zip(received.split(of_mine), sizes, strict=True)]
    whole = [torch.cat(pieces).view(matrix.shape) for matrix, *pieces in zip(mine, *parts, strict=True)]
    directions = [torch.empty_like(matrix, dtype=dtype) for matrix in whole]
    write_directions(whole, directions, dtype)

    received = flat.new_empty(sum(of_others), dtype=dtype)
    pieces = [each.flatten().split(lengths) for each, *lengths in zip(directions, *sizes, strict=True)]
    sent = torch.cat([piece for of_rank in zip(*pieces, strict=True) for piece in of_rank]) if mine else received[:0]
    distributed.all_to_all_single(received, sent, of_others, of_mine)
    spans = [span for spans in held for span in spans]
    for span, piece in zip(spans, received.split([_length(span) for span in spans]), strict=True):
        target[span] = piece


def _views(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Return consecutive parts of a flat tensor in these shapes."""
    begins = accumulate((shape.numel() for shape in shapes), initial=0)
    return [flat[begin : begin + shape.numel()].view(shape) for begin, shape in zip(begins, shapes, strict=False)]


def _length(span: slice) -> int:
    return int(span.stop - span.start)
