"""Operations on states, which are nested tuples of tensors: rebuild, detach, split and concatenate by rows."""

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from lmlong.native.state import map_state, state_tensors

State = TypeVar("State")


def named_tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Iterate over the tensors in nested tuples with their paths, such as blocks.0.attention.S."""
    if isinstance(value, Tensor):
        yield name, value
    elif value is not None:
        for key, part in zip(getattr(value, "_fields", range(len(value))), value, strict=True):
            yield from named_tensors(part, f"{name}.{key}" if name else str(key))


def rebuild_state(like: Any, tensors: Iterator[Tensor]) -> Any:
    """Return a state of the same structure with other tensors."""
    return map_state(lambda _: next(tensors), like)


def detach_state(state: State) -> State:
    """Detach a state from its graph, so that gradients do not flow to earlier tokens."""
    return map_state(Tensor.detach, state)


def at_least_float32(state: State) -> State:
    """Return a state with its half-precision tensors widened, so that it can be saved and continued in any format."""
    return map_state(lambda x: x.float() if x.dtype in (torch.bfloat16, torch.float16) else x, state)


def state_row(state: State, row: int) -> State:
    """Return the state of one row."""
    return map_state(lambda x: x[row : row + 1], state)


def concat_states(states: Sequence[State]) -> State:
    """Return the states of different texts as the rows of one state."""
    if len(states) == 1:
        return states[0]
    parts = zip(*(state_tensors(state) for state in states), strict=True)
    return rebuild_state(states[0], iter([torch.cat(_pad_to_longest(part)) for part in parts]))


def where_state(rows: Tensor, state: State, other: State) -> State:
    """Return `state` in the `rows` (B,) that are true, and `other` in the rest."""
    pairs = (_pad_to_longest(pair) for pair in zip(state_tensors(state), state_tensors(other), strict=True))
    return rebuild_state(state, iter([torch.where(rows.view(-1, *[1] * (a.dim() - 1)), a, b) for a, b in pairs]))


def state_bytes(state: Any) -> int:
    """Return the memory of all tensors of a state."""
    return sum(x.numel() * x.element_size() for x in state_tensors(state))


def _pad_to_longest(parts: Sequence[Tensor]) -> list[Tensor]:
    """Pad with zeros in front, since growing states differ in length. Zeros have no effect: no document has them."""
    longest = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
    missing = [[most - size for most, size in zip(longest, part.shape[1:], strict=True)] for part in parts]
    return [
        pad(part, [side for amount in reversed(lacks) for side in (amount, 0)]) if any(lacks) else part
        for part, lacks in zip(parts, missing, strict=True)
    ]
