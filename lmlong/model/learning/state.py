"""What a model has learned from the text it reads: a matrix and a bias beside its output layer, of constant size.

B batch, V vocabulary.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

BLOCK = 16
"""Positions of a document after which the output layer is updated. They all are predicted by the same weights."""

NOT_LEARNED = -1
"""Stands for a token that is unknown yet, or not learned from."""

Level = Literal["output", "bias"]
"""What is learned: a matrix and a bias, or only a bias, which costs less and gains less."""

LEVELS: tuple[Level, ...] = ("output", "bias")


class Rates(NamedTuple):
    """The step sizes for each token, and the share that is forgotten with each block."""

    rate: float  # of D
    bias_rate: float
    decay: float


DEFAULT_RATES = Rates(rate=0.004, bias_rate=0.05, decay=0.002)


class Learned(NamedTuple):
    """What was learned from the current document, and the block of positions that is not learned from yet."""

    D: Tensor | None  # (B, V, width) added to the weight of the output layer; None if only the bias is learned
    bias: Tensor  # (B, V)
    hidden: Tensor  # (B, BLOCK, width) the last hidden state at each position of the block so far, then zeros
    targets: Tensor  # (B, BLOCK) the token after each
    skip: Tensor  # (B,) whether the next token is not learned from


def init_learned(level: Level, position: Tensor, weight: Tensor) -> Learned:
    """Return the state before anything is learned, for rows that have read `position` (B,) tokens of their documents
    without learning. `weight` (V, width) is that of the output layer."""
    batch, (vocabulary, width) = len(position), weight.shape
    zeros = weight.new_zeros(batch, BLOCK, width, dtype=torch.promote_types(weight.dtype, torch.float32))
    return Learned(
        D=zeros.new_zeros(batch, vocabulary, width) if level == "output" else None,
        bias=zeros.new_zeros(batch, vocabulary),
        hidden=zeros,
        targets=position.new_full((batch, BLOCK), NOT_LEARNED),
        skip=position > 0,
    )


def will_learn_token(learned: Learned, learn: bool) -> Learned:
    """Return the state that learns from the next token, or does not."""
    return learned._replace(skip=torch.full_like(learned.skip, not learn))


def as_level(learn: Level | bool | None, default: Level | None = None) -> Level | None:
    """Return what an option `learn` asks for: True stands for `default` or the first level, None for `default`."""
    if learn is None:
        return default
    return (default or LEVELS[0]) if learn is True else learn or None


def level_of(learned: Learned | None) -> Level | None:
    """Return what a state learns."""
    return learned and ("bias" if learned.D is None else "output")
