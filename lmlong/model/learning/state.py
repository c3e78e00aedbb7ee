"""What a model has learned from the text it reads: a change of its output layer, of constant size.

It is learned by keys: the last hidden states, or fewer numbers if the vocabulary is large. A random projection keeps
the products of hidden states nearly, and learning uses nothing else of them.

B batch, V vocabulary, R rank: the size of a hidden state's key.
"""

from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lmlong.attention.state_check import StateError, check_range

BLOCK = 16
"""Positions of a document after which the output layer is updated. They all are predicted by the same weights."""

NOT_LEARNED = -1
"""Stands for a token that is unknown yet, or not learned from."""

MOST_NUMBERS = 1 << 22
"""Maximum number of numbers in D, which then takes at most 16 MiB."""

FIRST_SCALE, SCALE_RATE = 0.25, 0.15
"""The scale at the start of a document, and its largest step."""


class Rates(NamedTuple):
    """The step sizes of learning. That of each token's row falls as its squared errors add up."""

    rate: float  # of D
    bias_rate: float
    prior: float  # squared errors of a row after which its rate has fallen by the square root of 2

    def for_hidden(self, norm_gain: Tensor) -> "Rates":
        """Return the rates for hidden states after a norm with this gain (width,), by the mean of their square."""
        return self._replace(rate=self.rate / float(norm_gain.detach().square().sum()))


DEFAULT_RATES = Rates(rate=1.5, bias_rate=0.05, prior=30.0)
"""The rate is that for hidden states of norm 1."""


class Delta(NamedTuple):
    """What is added to the output layer, times the scale. The scale is learned too: where the text teaches nothing, it
    falls to 0."""

    D: Tensor  # (B, V, R)
    bias: Tensor  # (B, V)
    squares: Tensor  # (B, V) the sum of the squared errors of each token's probability
    scale: Tensor  # (B, 2) in this block and in the next
    slopes: Tensor  # (B,) 1 + the sum of the squared slopes of the loss by the scale

    def validate(self) -> None:
        """Raise StateError for values that no text gives."""
        if bool((self.squares < 0).any()) or bool((self.slopes < 1).any()):
            raise StateError("squares are below 0, or slopes below 1")
        if bool(((self.scale < 0) | (self.scale > 1)).any()):
            raise StateError("scale is not from 0 to 1")


class Learned(NamedTuple):
    """What was learned from the current document, and the block of positions that is not learned from yet."""

    delta: Delta
    hidden: Tensor  # (B, BLOCK, width) the last hidden state at each position of the block so far, then zeros
    targets: Tensor  # (B, BLOCK) the token after each
    skip: Tensor  # (B,) whether the next token is not learned from

    def validate(self) -> None:
        """Raise StateError for tokens that are not in the vocabulary."""
        check_range("targets", self.targets, NOT_LEARNED, self.delta.bias.shape[1] - 1)


def init_learned(position: Tensor, like: Tensor) -> Learned:
    """Return the state before anything is learned, for rows that have read `position` (B,) tokens of their documents
    without learning. `like` (V, width) has the shape of the output matrix and the dtype of the model."""
    batch, (vocabulary, width) = len(position), like.shape
    zeros = like.new_zeros(batch, BLOCK, width, dtype=torch.promote_types(like.dtype, torch.float32))
    delta = Delta(
        D=zeros.new_zeros(batch, vocabulary, rank(vocabulary, width)),
        bias=zeros.new_zeros(batch, vocabulary),
        squares=zeros.new_zeros(batch, vocabulary),
        scale=zeros.new_full((batch, 2), FIRST_SCALE),
        slopes=zeros.new_ones(batch),
    )
    return Learned(delta, zeros, position.new_full((batch, BLOCK), NOT_LEARNED), position > 0)


def reset(delta: Delta) -> None:
    """Forget in place what was learned, at the start of a document."""
    for x, value in zip(delta, (0, 0, 0, FIRST_SCALE, 1), strict=True):
        x.fill_(value)


def will_learn_token(learned: Learned, learn: bool) -> Learned:
    """Return the state that learns from the next token, or does not."""
    return learned._replace(skip=torch.full_like(learned.skip, not learn))


def rank(vocabulary: int, width: int) -> int:
    """Return the size of a key."""
    most = max(1, MOST_NUMBERS // vocabulary)
    return width if width <= most else 1 << (most.bit_length() - 1)


def keys_of(hidden: Tensor, D: Tensor) -> Tensor:
    """Return the keys (..., rank) of hidden states (..., width) for D (..., V, rank)."""
    width = hidden.shape[-1]
    if D.shape[-1] == width:
        return hidden
    with torch.autocast(hidden.device.type, enabled=False):
        return hidden @ _projection(width, D.shape[-1], hidden.device, hidden.dtype)


@cache
def _projection(width: int, rank: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return a random matrix (width, rank) with orthogonal columns that keeps the expected norm.

    It is the same on every machine, since saved states depend on it: numpy never changes the numbers of RandomState,
    and a QR decomposition is unique up to signs.
    """
    q, r = np.linalg.qr(np.random.RandomState(0).standard_normal((width, rank)))
    return torch.from_numpy(q * np.sign(np.diag(r)) * (width / rank) ** 0.5).to(device, dtype)
