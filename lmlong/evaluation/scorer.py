"""The loss on spans of a text, in constant memory however long they are."""

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from lmlong.evaluation.document_sums import Sums
from lmlong.evaluation.spans import Documents, Spans
from lmlong.model.language_model import PIECE
from lmlong.model.loss import IGNORED

TOKENS_AT_ONCE = 16_384
"""Short spans are read side by side, as many as make about so many tokens."""


class Predictor(Protocol):
    """A model that carries a state along a text: a `LanguageModel`, or an oracle in tests."""

    def token_nll(
        self, tokens: Tensor, targets: Tensor, mask: Tensor | None = None, state: Any = None
    ) -> tuple[Tensor, Any]:
        """Return -log p of each target (B, T), 0 where it is IGNORED, and the state after."""


class Scored(NamedTuple):
    """Consecutive targets of one document."""

    document: int
    first: int  # place of the first in the text
    nats: np.ndarray  # (targets,) float64


class Scorer:
    """Reads spans of one text with one model."""

    def __init__(
        self, model: Predictor, text: np.ndarray, documents: Documents, token_bytes: np.ndarray, device: torch.device
    ):
        self.model, self.text, self.documents = model, text, documents
        self.token_bytes, self.device = token_bytes, device

    def sums(self, spans: Spans, bar: tqdm, positions: dict[int, Sums] | None = None) -> Sums:
        """Return the sums of each document. With `positions`, sums by position are added to it: those of targets
        with 2^n to 2^(n + 1) - 1 tokens of their document before them are put under n."""
        sums = Sums(len(self.documents.begins))
        for document, first, nats in self.scored(spans, bar):
            sizes = self.token_bytes[self.text[first : first + len(nats)]]
            sums.add(document, nats.sum(), len(nats), sizes.sum())
            if positions is not None:
                before = np.arange(first, first + len(nats)) - self.documents.begins[document]
                bucket = np.frexp(before)[1] - 1
                for number in np.unique(bucket):
                    inside = bucket == number
                    found = positions.setdefault(int(number), Sums(len(self.documents.begins)))
                    found.add(document, nats[inside].sum(), inside.sum(), sizes[inside].sum())
        return sums

    def scored(self, spans: Spans, bar: tqdm) -> Iterator[Scored]:
        """Yield the targets of all spans, in any order; those of a long span in several pieces."""
        for rows in _groups(spans):
            state = None
            longest = int((rows.end - rows.begin).max()) - 1
            for place in range(0, longest, PIECE):
                tokens, targets, read = _piece(self.text, rows, place, min(PIECE, longest - place))
                with torch.inference_mode():
                    nll, state = self.model.token_nll(tokens.to(self.device), targets.to(self.device), state=state)
                nats, counted = nll.cpu().double().numpy(), (targets != IGNORED).numpy()
                firsts = np.maximum(rows.first, rows.begin + 1 + place)
                for number in np.flatnonzero(counted.any(axis=1)):
                    yield Scored(int(rows.document[number]), int(firsts[number]), nats[number][counted[number]])
                bar.update(read)


def tokens_read(spans: Spans) -> int:
    """Return how many tokens the model reads."""
    return int((spans.end - spans.begin - 1).sum())


def _groups(spans: Spans) -> Iterator[Spans]:
    """Yield spans of about equal length together."""
    sizes = spans.end - spans.begin - 1
    order = np.argsort(-sizes, kind="stable")
    begin = 0
    while begin < len(order):
        end = begin + max(1, TOKENS_AT_ONCE // int(sizes[order[begin]]))
        yield spans.take(order[begin:end])
        begin = end


def _piece(text: np.ndarray, rows: Spans, place: int, width: int) -> tuple[Tensor, Tensor, int]:
    """Return the inputs and targets of all rows from a place in their spans on, and their number of tokens."""
    tokens = np.zeros((len(rows.begin), width), dtype=np.int64)
    targets = np.full((len(rows.begin), width), IGNORED, dtype=np.int64)
    read = 0
    for number, (_, begin, first, end) in enumerate(zip(*rows, strict=True)):
        known = text[begin + place : min(begin + place + width + 1, end)]  # the last is a target only
        if len(known) < 2:
            continue
        tokens[number, : len(known) - 1] = known[:-1]
        unscored = max(0, first - (begin + place + 1))
        targets[number, unscored : len(known) - 1] = known[1 + unscored :]
        read += len(known) - 1
    return torch.from_numpy(tokens), torch.from_numpy(targets), read
