"""How much a model remembers while it reads and writes: the size of one row of its state."""

from typing import Any, NamedTuple

import torch

from lmlong.attention.contract import tensors
from lmlong.model.language_model import LanguageModel


class Size(NamedTuple):
    numbers: int
    bytes: int


class StateSize(NamedTuple):
    """What the state holds before the first token, and what each token adds: nothing, where the state is constant."""

    empty: Size
    per_token: Size


@torch.inference_mode()
def state_size(model: LanguageModel) -> StateSize:
    """The sizes as found in the tensors of the state itself, before and after a token, or a block of them."""
    nothing = model.init_state(1)
    count = model.hourglass.factor if model.hourglass else 1  # the least that each layer reads something of
    _, some = model.read(torch.zeros(1, count, dtype=torch.long, device=model.embedding.weight.device), nothing)
    before, after = size(nothing), size(some)
    return StateSize(before, Size((after.numbers - before.numbers) // count, (after.bytes - before.bytes) // count))


def size(state: Any) -> Size:
    """The size of all tensors in a state."""
    held = list(tensors(state))
    return Size(sum(x.numel() for x in held), sum(x.numel() * x.element_size() for x in held))
