"""Metrics of a model on a text, kept as sums and counts until a number is shown."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from lmlong.model.base import TextModel
from lmlong.model.device import as_float64, float64_device
from lmlong.model.loss import IGNORED


@dataclass(frozen=True)
class LossTotals:
    """The summed loss, and the counts of scored targets and their bytes. The end-of-text token has 0 bytes. A model of
    labels scores one target a document, and `correct` counts those that it finds most probable."""

    nats: float = 0.0
    tokens: int = 0
    bytes: int = 0
    correct: int = 0

    def __add__(self, other: "LossTotals") -> "LossTotals":
        tokens, size = self.tokens + other.tokens, self.bytes + other.bytes
        return LossTotals(self.nats + other.nats, tokens, size, self.correct + other.correct)

    @property
    def nats_per_token(self) -> float:
        return self.nats / self.tokens if self.tokens else math.nan

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.nats_per_token, 700.0))

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.bytes if self.bytes else math.nan

    @property
    def accuracy(self) -> float:
        """The share of labels that are correct."""
        return self.correct / self.tokens if self.tokens else math.nan

    @property
    def error_rate(self) -> float:
        """The share of labels that are wrong."""
        return 1 - self.accuracy

    @property
    def accuracy_error(self) -> float:
        """Its binomial standard error."""
        return math.sqrt(self.accuracy * (1 - self.accuracy) / self.tokens) if self.tokens else math.nan


class Metric(NamedTuple):
    """The metric by which models are compared; lower is better."""

    name: str  # a property of LossTotals
    unit: str

    def of(self, totals: LossTotals) -> float:
        return getattr(totals, self.name)


METRICS = {
    "causal": Metric("bits_per_byte", "bits/byte"),
    "masked": Metric("perplexity", "perplexity"),
    "label": Metric("error_rate", "errors"),
}
"""The metric of each objective. Masked tokens are only a part of a text, so their loss has no bits per byte. Of labels
it is not the loss, which grows while a model that is sure of itself still learns to choose better."""


def batch_tensors(
    batch: tuple[np.ndarray, np.ndarray, np.ndarray], device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, targets and mask as tensors, which share the arrays' memory on a CPU."""
    tokens, targets, mask = (torch.from_numpy(part).to(device) for part in batch)
    return tokens, targets, mask


@torch.no_grad()
def text_nll(
    model: TextModel, tokens: Tensor, targets: Tensor, mask: Tensor | None = None, state: Any = None
) -> tuple[Tensor, Any]:
    """Return -log p of each target (B, T), 0 if ignored, and the state after. A long text is read piece by piece from
    the state of the previous piece, in constant memory."""
    nll, size = [], model.piece(len(tokens))
    for begin in range(0, tokens.shape[1], size):
        piece = slice(begin, begin + size)
        hidden, state = model(tokens[:, piece], state, None if mask is None else mask[:, piece])
        nll.append(model.lm_head(hidden, targets=targets[:, piece], reduction="none"))
    return torch.cat(nll, dim=1), state


@torch.no_grad()
def label_logits(model: TextModel, tokens: Tensor, last: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the logits (B, labels) of rows (B, T) whose last tokens are at `last` (B,). A long row is read piece by
    piece, as in `text_nll`."""
    logits, state, size = None, None, model.piece(len(tokens))
    for begin in range(0, tokens.shape[1], size):
        piece = slice(begin, begin + size)
        hidden, state = model(tokens[:, piece], state, None if mask is None else mask[:, piece])
        at = (last - begin).clamp(0, hidden.shape[1] - 1)
        here = model.logits(hidden[torch.arange(len(at), device=at.device), at])
        logits = here if logits is None else torch.where((last >= begin)[:, None], here, logits)
    assert logits is not None, "nothing to read"
    return logits


def label_totals(model: TextModel, tokens: Tensor, targets: Tensor, mask: Tensor | None = None) -> LossTotals:
    """Return the totals of rows, each with its label as the target of its last token, or without any."""
    scored = targets != IGNORED
    has_label, last = scored.any(1), scored.long().argmax(1)
    logits, labels = label_logits(model, tokens, last, mask)[has_label], targets[scored]
    nats = cross_entropy(as_float64(logits), labels.to(float64_device(labels.device)), reduction="sum")
    return LossTotals(float(nats), len(labels), correct=int((logits.argmax(-1) == labels).sum()))


def loss_totals(
    model: TextModel, batches: Iterable[tuple[Tensor, Tensor, Tensor]], token_bytes: Tensor, carry_state: bool = False
) -> LossTotals:
    """Return the totals over batches of (tokens, targets, mask), each (rows, time), given the bytes of each token. A
    batch starts from an empty state, or with `carry_state` from the state after the previous batch."""
    totals, state = LossTotals(), None
    for tokens, targets, mask in batches:
        if model.labels is not None:
            totals += label_totals(model, tokens, targets, mask)
            continue
        nll, after = text_nll(model, tokens, targets, mask, state)
        state = after if carry_state else None
        nats = float(nll.to(float64_device(nll.device)).sum(dtype=torch.float64))
        scored = targets[targets != IGNORED]
        totals += LossTotals(nats, len(scored), int(token_bytes[scored].sum()))
    return totals
