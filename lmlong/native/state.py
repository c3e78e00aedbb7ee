"""States as nested tuples of tensors."""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch import Tensor

State = TypeVar("State")


def state_tensors(state: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples, lists and dicts, such as a state or the arguments of a function."""
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, tuple | list | dict):
        for part in state.values() if isinstance(state, dict) else state:
            yield from state_tensors(part)


def map_state(change: Callable[[Tensor], Tensor], state: State) -> State:
    """Return a state of the same structure with `change` applied to each tensor."""
    if isinstance(state, Tensor):
        return change(state)  # type: ignore[return-value]
    if state is None:
        return state
    parts = [map_state(change, part) for part in state]  # type: ignore[attr-defined]
    return type(state)(*parts) if hasattr(state, "_fields") else tuple(parts)  # type: ignore[return-value]
