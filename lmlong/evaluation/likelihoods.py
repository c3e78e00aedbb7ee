"""The log-probability of given text: of continuations, each after its context, and of whole documents.

A context is read once, however many continuations it has: the state after it is a value.

B rows, T time.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lmlong.attention.base import state_tensors
from lmlong.data.token_file import tokens_of
from lmlong.evaluation import spans as cut
from lmlong.evaluation.padded_batches import batches, read_rows, rows_at_once
from lmlong.evaluation.scorer import Scorer, tokens_read
from lmlong.inference.loading import TrainedLanguageModel
from lmlong.inference.session import PREFILL_TOKENS
from lmlong.model.finite import is_finite, not_finite
from lmlong.model.language_model import LanguageModel, ModelState
from lmlong.model.loss import IGNORED
from lmlong.model.state import rebuild_state
from lmlong.report.progress import Progress

LOGITS_AT_ONCE = 512
"""Tokens whose logits are in memory at a time."""


class Pair(NamedTuple):
    """Tokens to score, and those before them."""

    context: tuple[int, ...]  # one or more
    continuation: tuple[int, ...]


class Likelihood(NamedTuple):
    """The likelihood of one continuation."""

    log_probability: float
    is_greedy: bool  # whether every token is the likeliest


def likelihoods(
    model: LanguageModel, pairs: Sequence[Pair], rows: int | None = None
) -> Iterator[tuple[int, Likelihood]]:
    """Yield the number of each pair and its likelihood, in any order, reading `rows` in a batch."""
    numbers: dict[tuple[int, ...], list[int]] = {}
    for number, pair in enumerate(pairs):
        numbers.setdefault(pair.context, []).append(number)
    contexts = sorted(numbers, key=len, reverse=True)
    most = rows or rows_at_once(model)
    for batch in batches(model, [len(context) for context in contexts], rows):
        last, state = read_rows(model, contexts[batch])
        queue = [(row, number) for row, context in enumerate(contexts[batch]) for number in numbers[context]]
        queue.sort(key=lambda each: -len(pairs[each[1]].continuation))
        for begin in range(0, len(queue), most):
            some = queue[begin : begin + most]
            index = torch.tensor([row for row, _ in some], device=last.device)
            after = rebuild_state(state, iter([part[index] for part in state_tensors(state)]))
            scores = _score(model, last[index], after, [pairs[number].continuation for _, number in some])
            yield from zip([number for _, number in some], scores, strict=True)


@torch.inference_mode()
def _score(
    model: LanguageModel, last: Tensor, state: ModelState, continuations: Sequence[Sequence[int]]
) -> list[Likelihood]:
    """Return the likelihoods of continuations (B), given the last hidden state (B, width) and the state before each."""
    longest = max(1, *map(len, continuations))
    padded = [[*tokens, *[IGNORED] * (longest - len(tokens))] for tokens in continuations]
    targets = torch.tensor(padded, device=last.device)
    total, greedy = np.zeros(len(targets)), np.ones(len(targets), dtype=bool)
    for start, hidden in _hidden_states(model, last, state, targets):
        tokens = targets[:, start : start + hidden.shape[1]]
        row = (tokens != IGNORED).nonzero()[:, 0].cpu().numpy()
        log_probability, likeliest = _log_probabilities(model, hidden[tokens != IGNORED], tokens[tokens != IGNORED])
        total += np.bincount(row, log_probability, minlength=len(total))
        greedy[row[~likeliest]] = False
    return [Likelihood(float(nats), bool(all_likeliest)) for nats, all_likeliest in zip(total, greedy, strict=True)]


def _hidden_states(
    model: LanguageModel, last: Tensor, state: ModelState, targets: Tensor
) -> Iterator[tuple[int, Tensor]]:
    """Yield the hidden states (B, any, width) before consecutive targets, with the index of the first of these."""
    yield 0, last[:, None]
    inputs, size = targets[:, :-1].clamp(min=0), model.piece(len(targets), PREFILL_TOKENS)
    for start in range(0, inputs.shape[1], size):
        before, read = state, inputs[:, start : start + size]
        hidden, state = model(read, before)
        if not is_finite(hidden):
            raise not_finite(model, read, before)
        yield start + 1, hidden


def _log_probabilities(model: LanguageModel, hidden: Tensor, targets: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return the log-probability of each target (N,), and whether it is the likeliest token."""
    log_p, likeliest = [torch.zeros(0)], [torch.zeros(0, dtype=torch.bool)]
    for states, tokens in zip(hidden.split(LOGITS_AT_ONCE), targets.split(LOGITS_AT_ONCE), strict=True):
        logits = model.logits(states)
        log_p.append(logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0].cpu())
        likeliest.append((logits.argmax(-1) == tokens).cpu())
    return torch.cat(log_p).double().numpy(), torch.cat(likeliest).numpy()


def document_likelihoods(
    loaded: TrainedLanguageModel, texts: Sequence[str], *, score_eos: bool = False, show: bool = True
) -> list[float]:
    """Return the log-probability of each text as a document: after bos, each token given all tokens before it, in one
    pass. With `score_eos` it includes the end of the document, as `lmlong eval` does."""
    log_p = np.zeros(len(texts))
    given = [number for number, text in enumerate(texts) if text]
    if not given:
        return log_p.tolist()
    text = tokens_of([texts[number] for number in given], loaded.tokenizer)
    documents = cut.documents_of(text)
    spans = cut.whole(documents)
    if not score_eos:
        spans = spans._replace(end=spans.end - 1)
        spans = spans.take(np.flatnonzero(spans.end > spans.first))
    scorer = Scorer(loaded, text.tokens, documents)
    with Progress("Running loglikelihood_rolling requests", tokens_read(spans), "tokens", show) as progress:
        log_p[given] = -scorer.sums(spans, progress).nats
    return log_p.tolist()
