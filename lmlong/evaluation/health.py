"""What becomes of a linear attention's state while it reads: denominators near 0, sums that blow up, idle features."""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lmlong.attention.linear import LinearAttention
from lmlong.attention.scan import ScanState
from lmlong.evaluation.substitution import attentions_of, prefilled_by
from lmlong.model.language_model import PIECE, LanguageModel
from lmlong.model.positions import places


class Denominators(NamedTuple):
    """The denominators of all layers, heads and rows whose tokens stand between two places of their documents."""

    first: int
    last: int
    smallest: float
    median: float
    largest: float


@torch.no_grad()
def denominators(model: LanguageModel, tokens: Tensor, starts: Tensor) -> list[Denominators]:
    """By position, in buckets that double; none where the model has no linear attention."""
    linear = [attention for attention in attentions_of(model) if isinstance(attention, LinearAttention)]
    if not linear:
        return []
    seen: list[Tensor] = []

    def watched(attention: LinearAttention, *inputs: Any) -> Any:
        seen.append(attention.denominators(*inputs))
        return LinearAttention.prefill(attention, *inputs)

    with prefilled_by(watched, linear):
        model.read(tokens, None, starts)
    values = torch.cat(seen, dim=1)  # (batch, layers x heads, time)
    positions = places(starts, torch.zeros(len(tokens), dtype=torch.long, device=tokens.device), tokens.shape[1])
    buckets, first = [], 1
    while first <= int(positions.max()) + 1:
        last = min(2 * first - 1, int(positions.max()) + 1)
        inside = (positions + 1 >= first) & (positions + 1 <= last)
        chosen = values.transpose(1, 2)[inside].double()
        buckets.append(Denominators(first, last, float(chosen.min()), float(chosen.median()), float(chosen.max())))
        first = last + 1
    return buckets


class Health(NamedTuple):
    """The states of all layers and heads after so many tokens of a document."""

    position: int
    norm: float  # of S, the median
    features: float  # that carry z, as if all did alike: (sum z)^2 / sum z^2, the median
    of: int  # features that there are; the smallest number, where layers differ
    smallest: float  # denominator since the position before


@torch.no_grad()
def health(model: LanguageModel, text: np.ndarray) -> list[Health]:
    """At positions that double; none where the model has no linear attention."""
    linear = [attention for attention in attentions_of(model) if isinstance(attention, LinearAttention)]
    found: list[Health] = []
    smallest: list[float] = []

    def watched(attention: LinearAttention, *inputs: Any) -> Any:
        smallest.append(float(attention.denominators(*inputs).min()))
        return LinearAttention.prefill(attention, *inputs)

    state, place = model.init_state(1), 0
    with prefilled_by(watched, linear):
        while linear and (end := min(2 * place or 1, len(text))) > place:
            for begin in range(place, end, PIECE):
                piece = torch.from_numpy(text[begin : min(begin + PIECE, end)].astype(np.int64))
                _, state = model.read(piece[None].to(state.position.device), state)
            states = [block.attention for block in state.blocks if isinstance(block.attention, ScanState)]
            norms = torch.cat([held.S.double().flatten(2).norm(dim=-1).flatten() for held in states])
            carried = torch.cat([(held.z.sum(-1) ** 2 / held.z.square().sum(-1)).double().flatten() for held in states])
            features = min(held.z.shape[-1] for held in states)
            found.append(Health(end, float(norms.median()), float(carried.median()), features, min(smallest)))
            smallest.clear()
            place = end
    return found
