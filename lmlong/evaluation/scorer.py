"""The loss on spans of a text, in memory that does not depend on their length."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lmlong.evaluation.document_sums import Sums
from lmlong.evaluation.kept_steps import KeptSteps
from lmlong.evaluation.spans import Documents, Spans
from lmlong.inference.loading import TrainedLanguageModel
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
    hidden: Tensor  # (targets, width)


class Predictions(NamedTuple):
    """The loss and the hidden state of all targets of some spans, in order."""

    nats: np.ndarray  # (targets,) float64
    hidden: Tensor  # (targets, width); (0,) if it was not asked for


Addition = tuple[int, int, float, int, int]
"""A bucket by position, or ALL; a document, and what its sums grow by: nats, tokens and bytes."""

ALL = -1
"""In place of a bucket: the sums of all positions."""


class Scorer:
    """Reads spans of one text with one model. Finished groups of spans are `kept` under the name of their job."""

    def __init__(
        self, loaded: TrainedLanguageModel, text: np.ndarray, documents: Documents, kept: KeptSteps | None = None
    ):
        self.model, self.tokenizer, self.device = loaded.model, loaded.tokenizer, loaded.device
        self.learn = loaded.learn
        self.text, self.documents = text, documents
        self.kept = kept or KeptSteps()
        self.seconds = 0.0
        """The time that reading took, also before it was interrupted."""

    def sums(
        self, spans: Spans, progress: Progress | None = None, positions: dict[int, Sums] | None = None, job: str = ""
    ) -> Sums:
        """Return the sums of each document. With `positions`, add sums by position to it: under n those of targets
        with 2^n to 2^(n + 1) - 1 tokens of their document before them."""
        sums = self.documents.sums()

        def read(numbers: np.ndarray) -> list[Addition]:
            return [
                addition
                for scored in self._read(spans, numbers, progress)
                for addition in self._additions(scored, int(spans.document[scored.span]), positions is not None)
            ]

        for additions in self._by_group(job, spans, progress, read):
            for bucket, document, nats, tokens, size in additions:
                of = sums if bucket == ALL or positions is None else positions.setdefault(bucket, self.documents.sums())
                of.add(document, nats, tokens, size)
        return sums

    def _additions(self, scored: Scored, document: int, by_position: bool) -> Iterator[Addition]:
        nats, first = scored.nats, scored.first
        sizes = self.sizes(slice(first, first + len(nats)))
        yield ALL, document, float(nats.sum()), len(nats), int(sizes.sum())
        if by_position:
            before = np.arange(first, first + len(nats)) - self.documents.begins[document]
            bucket = np.frexp(before)[1] - 1
            for number in np.unique(bucket):
                inside = bucket == number
                yield int(number), document, float(nats[inside].sum()), int(inside.sum()), int(sizes[inside].sum())

    def predictions(self, spans: Spans, progress: Progress | None = None, job: str = "") -> Predictions:
        """Return the loss of all targets, in memory that grows with them and not with the text before them."""
        nats, offsets = self._places(spans)

        def read(numbers: np.ndarray) -> list[tuple[int, list[float]]]:
            scored = self._read(spans, numbers, progress)
            return [(int(offsets[each.span]) + each.first, each.nats.tolist()) for each in scored]

        for group in self._by_group(job, spans, progress, read):
            for begin, values in group:
                nats[begin : begin + len(values)] = values
        return Predictions(nats, torch.zeros(0))

    def hidden_predictions(self, spans: Spans, progress: Progress | None = None) -> Predictions:
        """Return the loss and the hidden state of all targets, which are not kept."""
        nats, offsets = self._places(spans)
        hidden = torch.zeros(0)
        begun = time.perf_counter()
        for each in self.scored(spans, progress):
            if not len(hidden):
                hidden = each.hidden.new_zeros(len(nats), each.hidden.shape[1])
            begin = int(offsets[each.span]) + each.first
            nats[begin : begin + len(each.nats)] = each.nats
            hidden[begin : begin + len(each.nats)] = each.hidden
        self.seconds += time.perf_counter() - begun
        return Predictions(nats, hidden)

    def _places(self, spans: Spans) -> tuple[np.ndarray, np.ndarray]:
        """Return an array for the targets of all spans, and what is added to the index of a target of each span."""
        counts = spans.end - spans.first
        return np.zeros(counts.sum()), counts.cumsum() - counts - spans.first

    def _by_group(
        self, job: str, spans: Spans, progress: Progress | None, read: Callable[[np.ndarray], Any]
    ) -> Iterator[Any]:
        """Yield what `read` returns for each group of spans, or what is kept of it."""

        def timed(numbers: np.ndarray) -> tuple[float, Any]:
            begun = time.perf_counter()
            result = read(numbers)
            return time.perf_counter() - begun, result

        for number, numbers in enumerate(self._groups(spans)):
            name = f"{job} {number}"
            if progress and name in self.kept:
                progress.skip(tokens_read(spans.take(numbers)))
            seconds, result = self.kept.get(name, partial(timed, numbers))
            self.seconds += seconds
            yield result

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
        states = STATES_AT_ONCE // max(1, state_bytes(self.model.init_state(1, self.learn)))
        begin = 0
        while begin < len(order):
            end = begin + max(1, min(TOKENS_AT_ONCE // int(sizes[order[begin]]), states))
            yield order[begin:end]
            begin = end

    def _read(self, spans: Spans, numbers: np.ndarray, progress: Progress | None) -> Iterator[Scored]:
        """Yield the targets of one group of spans."""
        rows, state = spans.take(numbers), self.model.init_state(len(numbers), self.learn)
        longest = int((rows.end - rows.begin).max()) - 1
        size = self.model.piece(len(numbers))
        for start in range(0, longest, size):
            tokens, targets, read = _piece(self.text, rows, start, min(size, longest - start))
            counted = targets != IGNORED
            with torch.inference_mode():
                nll, hidden, state = self.model.score(tokens.to(self.device), targets.to(self.device), state)
                nll, hidden = nll[counted.to(self.device)], hidden[counted.to(self.device)]
            firsts = np.maximum(rows.first, rows.begin + 1 + start)
            yield from _by_span(numbers, firsts, counted.sum(1).tolist(), nll, hidden)
            if progress:
                progress.update(read)


def tokens_read(spans: Spans) -> int:
    """Return the number of tokens that the model reads."""
    return int((spans.end - spans.begin - 1).sum())


def _by_span(
    numbers: np.ndarray, firsts: np.ndarray, counts: list[int], nll: Tensor, hidden: Tensor
) -> Iterator[Scored]:
    """Yield the targets of each span that has any."""
    parts = zip(nll.cpu().double().split(counts), hidden.split(counts), strict=True)
    for span, first, (nats, states) in zip(numbers.tolist(), firsts.tolist(), parts, strict=True):
        if len(nats):
            yield Scored(span, first, nats.numpy(), states)


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
