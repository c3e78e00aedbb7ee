"""States as the nested tuples of tensors that they are: taken apart, put together, row by row."""

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from lmlong.attention.contract import tensors

State = TypeVar("State")


def rebuilt(like: Any, others: Iterator[Tensor]) -> Any:
    """A state of the same nesting from other tensors."""
    if isinstance(like, Tensor):
        return next(others)
    if like is None:
        return None
    parts = [rebuilt(part, others) for part in like]
    return type(like)(*parts) if hasattr(like, "_fields") else tuple(parts)


def detached(state: State) -> State:
    """The state without the graph that made it."""
    return rebuilt(state, iter([x.detach() for x in tensors(state)]))


def row_of(state: State, row: int) -> State:
    """The state of one row alone."""
    return rebuilt(state, iter([x[row : row + 1] for x in tensors(state)]))


def joined(states: Sequence[State]) -> State:
    """States of different texts as the rows of one."""
    parts = zip(*(tensors(state) for state in states), strict=True)
    return rebuilt(states[0], iter([torch.cat(_of_one_size(part)) for part in parts]))


def chosen(rows: Tensor, state: State, other: State) -> State:
    """The state in those `rows` (B,) that are true, and the other one in the rest."""
    pairs = (_of_one_size(pair) for pair in zip(tensors(state), tensors(other), strict=True))
    return rebuilt(state, iter([torch.where(rows.view(-1, *[1] * (a.dim() - 1)), a, b) for a, b in pairs]))


def alike(found: Sequence[Tensor], empty: Sequence[Tensor]) -> bool:
    """Whether tensors may be those of a state that began as `empty`, where what grows has no size yet."""
    return len(found) == len(empty) and all(
        one.dim() == other.dim() and all(need in (size, 0) for need, size in zip(other.shape, one.shape, strict=True))
        for one, other in zip(found, empty, strict=True)
    )


def _of_one_size(parts: Sequence[Tensor]) -> list[Tensor]:
    """A state that grows is longer in one text than in another, and has nothing before its first token, which zeros say
    too: they belong to no document."""
    longest = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
    missing = [[most - size for most, size in zip(longest, part.shape[1:], strict=True)] for part in parts]
    return [
        pad(part, [side for amount in reversed(lacks) for side in (amount, 0)]) if any(lacks) else part
        for part, lacks in zip(parts, missing, strict=True)
    ]
