"""How far a linear attention's denominators are from 0 while it reads: where they die, so does its output."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lmlong.attention.linear import LinearAttention
from lmlong.evaluation.substitution import attentions_of, prefilled_by
from lmlong.model.language_model import LanguageModel
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
