"""The size of a model's state, for one row."""

from typing import Any, NamedTuple

import torch

from lmlong.attention.base import state_tensors
from lmlong.model.language_model import LanguageModel
from lmlong.model.learning.read import first_state, read
from lmlong.model.state import state_bytes


def binary_size(count: float) -> str:
    """Return a number of bytes as people read it, such as 84.0 KiB."""
    unit = "bytes"
    for larger in ("KiB", "MiB", "GiB"):
        if count < 1024:
            break
        count, unit = count / 1024, larger
    return f"{count:,.0f} {unit}" if unit == "bytes" or count >= 100 else f"{count:.1f} {unit}"


class Size(NamedTuple):
    numbers: int
    bytes: int


class StateSize(NamedTuple):
    """The size of the state before the first token, and the size that each token adds: 0 for a constant state."""

    empty: Size
    per_token: Size


@torch.inference_mode()
def state_size(model: LanguageModel, learn: bool = False) -> StateSize:
    """Return the sizes, measured on the tensors of the state before and after a token, or a block of tokens. `learn`:
    whether the state learns from its text."""
    nothing = first_state(model, 1, learn)
    count = model.hourglass.factor if model.hourglass else 1  # the fewest tokens with which every layer reads a vector
    _, some = read(model, nothing.position.new_zeros(1, count), nothing)
    before, after = size(nothing), size(some)
    return StateSize(before, Size((after.numbers - before.numbers) // count, (after.bytes - before.bytes) // count))


def size(state: Any) -> Size:
    """Return the size of all tensors in a state."""
    return Size(sum(x.numel() for x in state_tensors(state)), state_bytes(state))
