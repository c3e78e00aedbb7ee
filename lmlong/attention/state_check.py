"""Checks of a state that was read from an untrusted file.

Native code reads memory by the shapes and integers of a state. A state is therefore checked once, before it is used,
and the message names the tensor.
"""

from typing import Any

import torch
from torch import Tensor

REAL = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
"""Interchangeable dtypes: a recurrence may sum in float64, and autocast rounds the last inputs."""


class StateError(ValueError):
    """A state that is invalid for the model. The message begins with the path of the tensor."""

    def inside(self, path: str) -> "StateError":
        """Return the error with the path extended, for a state that is part of another."""
        return StateError(f"{path}.{self}" if path else str(self))


def check_alike(state: Any, empty: Any, grows: bool = False, name: str = "") -> None:
    """Raise StateError unless `state` has the structure, shapes and dtypes of `empty`, and finite values. With `grows`,
    a size that is 0 in `empty` may have any value. A state class with further requirements, such as the range of
    indices, checks them in a method `validate`."""
    if isinstance(empty, Tensor):
        _check_tensor(name, state, empty, grows)
    elif empty is not None:
        for key, part, like in zip(getattr(empty, "_fields", range(len(empty))), state, empty, strict=True):
            check_alike(part, like, grows, f"{name}.{key}" if name else str(key))
        if hasattr(state, "validate"):
            try:
                state.validate()
            except StateError as error:
                raise error.inside(name) from None


def _check_tensor(name: str, x: Tensor, empty: Tensor, grows: bool) -> None:
    fits = (size == expected or (grows and expected == 0) for size, expected in zip(x.shape, empty.shape, strict=False))
    if x.ndim != empty.ndim or not all(fits):
        raise StateError(f"{name} has the shape {tuple(x.shape)}, this model's is {tuple(empty.shape)}")
    if x.dtype != empty.dtype and not {x.dtype, empty.dtype} <= REAL:
        raise StateError(f"{name} is {x.dtype}, this model's is {empty.dtype}")
    if x.dtype == torch.bool and bool((x.view(torch.uint8) > 1).any()):
        raise StateError(f"{name} has bytes that are neither true nor false")
    if x.is_floating_point() and not bool(x.float().isfinite().all()):  # of float64 too, which native code may narrow
        raise StateError(f"{name} has values that are not finite")


def check_range(name: str, x: Tensor, least: int, most: int) -> None:
    """Raise StateError unless all integers are from `least` to `most`."""
    wrong = x[(x < least) | (x > most)]
    if len(wrong):
        raise StateError(f"{name} holds {int(wrong[0])}, which is not from {least} to {most}")
