"""What becomes of a linear attention's state while it reads: denominators near 0, sums that blow up, idle features."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lmlong.attention.linear.layer import LinearAttention
from lmlong.attention.linear.naive import LinearState
from lmlong.model.device import as_float64
from lmlong.model.language_model import PIECE, LanguageModel
from lmlong.model.rope import document_positions


class Denominators(NamedTuple):
    """The denominators of all layers, heads and rows whose tokens stand between two positions of their documents."""

    first: int
    last: int
    smallest: float
    median: float
    largest: float


@torch.no_grad()
def denominators(model: LanguageModel, tokens: Tensor, document_starts: Tensor) -> list[Denominators]:
    """By position, in buckets that double; none where the model has no linear attention."""
    linear = [attention for attention in model.attention_parts if isinstance(attention, LinearAttention)]
    if not linear:
        return []
    seen: list[Tensor] = []
    with _watched(linear, lambda attention, inputs: seen.append(attention.denominators(*inputs))):
        model.hidden_states(tokens, None, document_starts)
    stand = _stands(model, tokens, document_starts)
    # what is of another shape is a layer's second look at the blocks of one row, which it has seen before
    seen = [values for values in seen if len(values) == len(tokens) and values.shape[2] in stand]
    buckets, first, longest = [], 1, int(max(positions.max() for positions in stand.values())) + 1
    while first <= longest:
        last = min(2 * first - 1, longest)
        inside = {time: (at + 1 >= first) & (at + 1 <= last) for time, at in stand.items()}
        chosen = torch.cat([values.transpose(1, 2)[inside[values.shape[2]]].flatten() for values in seen])
        chosen = as_float64(chosen)
        if len(chosen):
            buckets.append(Denominators(first, last, float(chosen.min()), float(chosen.median()), float(chosen.max())))
        first = last + 1
    return buckets


@contextmanager
def _watched(attentions: Sequence[LinearAttention], hook: Callable[..., None]) -> Iterator[None]:
    """While this lasts, call the hook with each attention and its inputs before its forward pass."""
    with ExitStack() as hooks:
        for attention in attentions:
            hooks.callback(attention.register_forward_pre_hook(hook).remove)
        yield


def _stands(model: LanguageModel, tokens: Tensor, document_starts: Tensor) -> dict[int, Tensor]:
    """Where what a layer reads stands in its document, by how much the layer reads: all tokens, or the last of each
    block; below 0 where it is neither."""
    time = tokens.shape[1]
    positions = document_positions(
        document_starts, torch.zeros(len(tokens), dtype=torch.long, device=tokens.device), time
    )
    if model.hourglass is None:
        return {time: positions}
    ends, full = model.hourglass.block_ends(positions, time // model.hourglass.factor)
    return {time: positions, ends.shape[1]: positions.gather(1, ends).where(full, -1)}


def _linear_states(state: Any) -> Iterator[LinearState]:
    """Iterate over the states of linear attention in a state, however its tuples are nested."""
    if isinstance(state, LinearState):
        yield state
    elif isinstance(state, tuple):
        for part in state:
            yield from _linear_states(part)


class Health(NamedTuple):
    """The states of all layers and heads after so many tokens of a document."""

    position: int
    norm: float  # of S, the median
    features: float  # in use, the participation ratio (sum z)^2 / sum z^2 of z: the median
    of: int  # features that there are; the smallest number, where layers differ
    smallest: float  # denominator since the position before


@torch.no_grad()
def health(model: LanguageModel, text: np.ndarray) -> list[Health]:
    """At positions that double; none where the model has no linear attention."""
    linear = [attention for attention in model.attention_parts if isinstance(attention, LinearAttention)]
    found: list[Health] = []
    smallest: list[float] = []

    def watch(attention: LinearAttention, inputs: tuple[Any, ...]) -> None:
        smallest.append(float(attention.denominators(*inputs).min()))

    state, place = model.init_state(1), 0
    with _watched(linear, watch):
        while linear and (end := min(2 * place or 1, len(text))) > place:
            for begin in range(place, end, PIECE):
                piece = torch.from_numpy(text[begin : min(begin + PIECE, end)].astype(np.int64))
                _, state = model.hidden_states(piece[None].to(state.position.device), state)
            states = list(_linear_states(state.blocks))
            states = [held for held in states if held.z.any()]  # layers that read blocks begin when the first is full
            if not states:
                place = end
                continue
            norms = torch.cat([as_float64(held.S).flatten(2).norm(dim=-1).flatten() for held in states])
            carried = torch.cat(
                [as_float64(held.z.sum(-1) ** 2 / held.z.square().sum(-1)).flatten() for held in states]
            )
            features = min(held.z.shape[-1] for held in states)
            found.append(Health(end, float(norms.median()), float(carried.median()), features, min(smallest)))
            smallest.clear()
            place = end
    return found
