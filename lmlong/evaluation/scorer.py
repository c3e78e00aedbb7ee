"""The loss on spans of a text, in memory that does not depend on their length."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lmlong.evaluation.document_sums import Sums
from lmlong.evaluation.spans import Documents, Spans
from lmlong.inference.loading import TrainedLanguageModel
from lmlong.model.learning.read import first_state, score
from lmlong.model.loss import IGNORED
from lmlong.model.state import state_bytes
from lmlong.report.progress import Progress

TOKENS_AT_ONCE = 16_384
"""Approximate number of tokens in a batch of short spans."""

STATES_AT_ONCE = 256 << 20
"""Memory of the states of a batch in bytes, unless one takes more: those before and after a piece exist at once."""


class Scored(NamedTuple):
    """Consecutive targets of one span."""

    span: int
    first: int  # index of the first in the text
    nats: np.ndarray  # (targets,) float64


class Scorer:
    """Reads spans of one text with one model."""

    def __init__(self, loaded: TrainedLanguageModel, text: np.ndarray, documents: Documents):
        self.model, self.tokenizer, self.device = loaded.model, loaded.tokenizer, loaded.device
        self.learn = loaded.learn
        self.text, self.documents = text, documents

    def sums(self, spans: Spans, progress: Progress | None = None, positions: dict[int, Sums] | None = None) -> Sums:
        """Return the sums of each document. With `positions`, add sums by position to it: under n those of targets
        with 2^n to 2^(n + 1) - 1 tokens of their document before them."""
        sums = self.documents.sums()
        for span, first, nats in self.scored(spans, progress):
            document, sizes = int(spans.document[span]), self.sizes(slice(first, first + len(nats)))
            sums.add(document, nats.sum(), len(nats), sizes.sum())
            if positions is not None:
                before = np.arange(first, first + len(nats)) - self.documents.begins[document]
                bucket = np.frexp(before)[1] - 1
                for number in np.unique(bucket):
                    inside = bucket == number
                    at_position = positions.setdefault(int(number), self.documents.sums())
                    at_position.add(document, nats[inside].sum(), inside.sum(), sizes[inside].sum())
        return sums

    def sizes(self, index: np.ndarray | slice) -> np.ndarray:
        """Return the bytes of the tokens at some indices of the text."""
        return self.tokenizer.token_bytes[self.text[index]]

    def scored(self, spans: Spans, progress: Progress | None = None) -> Iterator[Scored]:
        """Yield the targets of all spans, in any order; those of a long span in several pieces. Logits are computed for
        targets only."""
        for numbers in self._groups(spans):
            yield from self._read(spans, numbers, progress)

    def _groups(self, spans: Spans) -> Iterator[np.ndarray]:
        """Yield groups of spans of about equal length, by their numbers."""
        sizes = spans.end - spans.begin - 1
        order = np.argsort(-sizes, kind="stable")
        states = STATES_AT_ONCE // max(1, state_bytes(first_state(self.model, 1, self.learn)))
        begin = 0
        while begin < len(order):
            end = begin + max(1, min(TOKENS_AT_ONCE // int(sizes[order[begin]]), states))
            yield order[begin:end]
            begin = end

    def _read(self, spans: Spans, numbers: np.ndarray, progress: Progress | None) -> Iterator[Scored]:
        """Yield the targets of one group of spans."""
        rows, state = spans.take(numbers), first_state(self.model, len(numbers), self.learn)
        longest = int((rows.end - rows.begin).max()) - 1
        size = self.model.piece(len(numbers))
        for start in range(0, longest, size):
            tokens, targets, read = _piece(self.text, rows, start, min(size, longest - start))
            counted = targets != IGNORED
            with torch.inference_mode():
                nll, state = score(self.model, tokens.to(self.device), targets.to(self.device), state)
                nll = nll[counted.to(self.device)]
            firsts = np.maximum(rows.first, rows.begin + 1 + start)
            yield from _by_span(numbers, firsts, counted.sum(1).tolist(), nll)
            if progress:
                progress.update(read)


def tokens_read(spans: Spans) -> int:
    """Return the number of tokens that the model reads."""
    return int((spans.end - spans.begin - 1).sum())


def _by_span(numbers: np.ndarray, firsts: np.ndarray, counts: list[int], nll: Tensor) -> Iterator[Scored]:
    """Yield the targets of each span that has any."""
    parts = nll.cpu().double().split(counts)
    for span, first, nats in zip(numbers.tolist(), firsts.tolist(), parts, strict=True):
        if len(nats):
            yield Scored(span, first, nats.numpy())


def _piece(text: np.ndarray, rows: Spans, start: int, width: int) -> tuple[Tensor, Tensor, int]:
    """Return the inputs and targets of all rows from an offset in their spans, and their number of tokens."""
    tokens = np.zeros((len(rows.begin), width), dtype=np.int64)
    targets = np.full((len(rows.begin), width), IGNORED, dtype=np.int64)
    read = 0
    for number, (_, begin, first, end) in enumerate(zip(*rows, strict=True)):
        piece = text[begin + start : min(begin + start + width + 1, end)]  # the last token is a target only
        if len(piece) < 2:
            continue
        tokens[number, : len(piece) - 1] = piece[:-1]
        unscored = max(0, first - (begin + start + 1))
        targets[number, unscored : len(piece) - 1] = piece[1 + unscored :]
        read += len(piece) - 1
    return torch.from_numpy(tokens), torch.from_numpy(targets), read
