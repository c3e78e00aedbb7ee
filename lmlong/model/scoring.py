"""How well a model predicts a text, kept as sums and counts until a number is shown."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lmlong.model.loss import IGNORED
from lmlong.model.text_model import TextModel


@dataclass(frozen=True)
class Totals:
    """What was lost on how much text. Bytes are those of the scored targets, so ends of documents weigh nothing."""

    nats: float = 0.0
    tokens: int = 0
    bytes: int = 0

    def __add__(self, other: "Totals") -> "Totals":
        return Totals(self.nats + other.nats, self.tokens + other.tokens, self.bytes + other.bytes)

    @property
    def nats_per_token(self) -> float:
        return self.nats / self.tokens if self.tokens else math.nan

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.nats_per_token, 700.0))

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.bytes if self.bytes else math.nan


class Figure(NamedTuple):
    """The number that tells how good a model is; less is better."""

    name: str  # of a property of Totals
    unit: str

    def of(self, totals: Totals) -> float:
        return getattr(totals, self.name)


FIGURES = {"causal": Figure("bits_per_byte", "bits/byte"), "masked": Figure("perplexity", "perplexity")}
"""That of each objective. Hidden tokens are not all of a text, so what they take says nothing of its bytes."""


def count_bytes(targets: Tensor, token_bytes: Tensor) -> int:
    """UTF-8 bytes of the scored targets; `token_bytes` holds those of each token of the vocabulary."""
    return int(token_bytes[targets[targets != IGNORED]].sum())


def score(model: TextModel, batches: Iterable[tuple[Tensor, Tensor, Tensor]], token_bytes: Tensor) -> Totals:
    """Totals over batches of (tokens, targets, marks), each (rows, time), each read by itself."""
    totals = Totals()
    for tokens, targets, marks in batches:
        lost = float(model.nats(tokens, targets, marks).sum(dtype=torch.float64))
        totals += Totals(lost, int((targets != IGNORED).sum()), count_bytes(targets, token_bytes))
    return totals
