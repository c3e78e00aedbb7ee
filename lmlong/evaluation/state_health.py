"""The health of the states of attentions with denominators: values near 0, growing sums, unused features."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lmlong.attention.base import CausalAttention
from lmlong.model.device import as_float64
from lmlong.model.language_model import LanguageModel, ModelState
from lmlong.model.rope import document_positions
from lmlong.report.table import Column, format_range


class Denominators(NamedTuple):
    """The denominators of all layers, heads and rows at tokens between two positions of their documents."""

    first: int
    last: int
    smallest: float
    median: float
    largest: float


DENOMINATORS = [
    Column("denominators at position", 28, align="<", value=lambda bucket: format_range(bucket.first, bucket.last)),
    *(Column(name, 14, ".3g", value=name) for name in ("smallest", "median", "largest")),
]


@torch.no_grad()
def denominators(model: LanguageModel, tokens: Tensor, document_starts: Tensor) -> list[Denominators]:
    """Return denominators by position, in buckets that double; none for a model without any."""
    dividing = _dividing(model)
    if not dividing:
        return []
    seen: list[Tensor] = []
    with (
        watched(dividing, lambda attention, inputs: seen.append(attention.denominators(*inputs))),
        model.whole_blocks(),
    ):
        model(tokens, None, document_starts)
        positions = _positions(model, tokens, document_starts)
    # other shapes come from a layer that reads the blocks of one row a second time
    seen = [values for values in seen if len(values) == len(tokens) and values.shape[2] in positions]
    buckets, first, longest = [], 1, int(max(of_tokens.max() for of_tokens in positions.values())) + 1
    while first <= longest:
        last = min(2 * first - 1, longest)
        inside = {time: (at + 1 >= first) & (at + 1 <= last) for time, at in positions.items()}
        chosen = torch.cat([values.transpose(1, 2)[inside[values.shape[2]]].flatten() for values in seen])
        chosen = as_float64(chosen)
        if len(chosen):
            buckets.append(Denominators(first, last, float(chosen.min()), float(chosen.median()), float(chosen.max())))
        first = last + 1
    return buckets


@contextmanager
def watched(modules: Iterable[nn.Module], hook: Callable[[Any, tuple[Any, ...]], None]) -> Iterator[None]:
    """Return a context in which a hook is called with each module and its inputs before its forward pass."""
    with ExitStack() as hooks:
        for module in modules:
            hooks.callback(module.register_forward_pre_hook(hook).remove)
        yield


def _positions(model: LanguageModel, tokens: Tensor, document_starts: Tensor) -> dict[int, Tensor]:
    """Return the positions in their documents of the tokens that a layer reads, by their number: all tokens, or the
    last of each block; -1 for incomplete blocks."""
    time = tokens.shape[1]
    positions = document_positions(
        document_starts, torch.zeros(len(tokens), dtype=torch.long, device=tokens.device), time
    )
    if model.hourglass is None:
        return {time: positions}
    blocks = time // model.hourglass.factor
    ends, valid, _ = model.hourglass.slots(positions, blocks)
    return {time: positions, **({blocks: positions.gather(1, ends).where(valid, -1)} if blocks else {})}


def _dividing(model: LanguageModel) -> list[CausalAttention]:
    """Return the attentions of a model that have denominators."""
    return [attention for attention in model.attention_parts if attention.has_denominators]


def _dividing_states(model: LanguageModel, state: ModelState) -> Iterator[Any]:
    """Iterate over the states of these attentions, each with S and z."""
    for attention, block in zip(model.attentions, state.blocks, strict=True):
        states = (block.attention,) if attention.parts == (attention,) else block.attention
        yield from (held for part, held in zip(attention.parts, states, strict=True) if part.has_denominators)


class Health(NamedTuple):
    """The states of all layers and heads after `position` tokens of a document."""

    position: int
    norm: float  # of S, the median
    features: float  # in use, the participation ratio (sum z)^2 / sum z^2 of z: the median
    of: int  # the number of features; the smallest, if layers differ
    smallest: float  # denominator since the previous position


HEALTH = [
    Column("tokens read", 17, ",", value="position"),
    Column("norm of S", 13, ".4g", value="norm"),
    Column("features in use", 19, value=lambda row: f"{row.features:.1f} of {row.of}"),
    Column("smallest denominator", 24, ".3g", value="smallest"),
]


@torch.no_grad()
def health(model: LanguageModel, text: np.ndarray) -> list[Health]:
    """Return the health at positions that double; nothing for a model without denominators."""
    dividing = _dividing(model)
    points: list[Health] = []
    smallest: list[float] = []

    def watch(attention: CausalAttention, inputs: tuple[Any, ...]) -> None:
        smallest.append(float(attention.denominators(*inputs).min()))

    state, read, size = model.init_state(1), 0, model.piece(1)
    with watched(dividing, watch), model.whole_blocks():
        while dividing and (end := min(2 * read or 1, len(text))) > read:
            for begin in range(read, end, size):
                piece = torch.from_numpy(text[begin : min(begin + size, end)].astype(np.int64))
                _, state = model(piece[None].to(state.position.device), state)
            read = end
            states = [part for part in _dividing_states(model, state) if part.z.any()]
            if not states:  # layers that read blocks begin when the first is complete
                continue
            norms = torch.cat([as_float64(part.S).flatten(2).norm(dim=-1).flatten() for part in states])
            in_use = torch.cat([as_float64(part.z.sum(-1) ** 2 / part.z.square().sum(-1)).flatten() for part in states])
            features = min(part.z.shape[-1] for part in states)
            points.append(Health(end, float(norms.median()), float(in_use.median()), features, min(smallest)))
            smallest.clear()
    return points
