"""Ways to read a text with a causal language model, all of which must come to the same.

B batch, T time, V vocabulary.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from random import Random
from typing import NamedTuple

import torch
from models import predict
from torch import Tensor

from lmlong.decode.engine import step
from lmlong.model.language_model import LanguageModel, ModelState
from lmlong.model.state import concat_states, state_row

STEPS = 32
"""Tokens that are decoded one by one; those before are read at once."""

AFTER = 6
"""Last tokens, read at once, that show what a growing state holds: it may hold the same in different ways."""


class Text(NamedTuple):
    tokens: Tensor  # (B, T)
    document_starts: Tensor  # (B, T) bool
    position: Tensor  # (B,) tokens of the document before the first one, of which nothing is remembered

    def cut(self, begin: int, end: int) -> "Text":
        return Text(self.tokens[:, begin:end], self.document_starts[:, begin:end], self.position)

    def row(self, row: int) -> "Text":
        return Text(*(x[row : row + 1] for x in self))


class Outcome(NamedTuple):
    logits: Tensor  # (B, T, V)
    state: ModelState | None


Way = Callable[[LanguageModel, Text, ModelState], Outcome]
"""A way to read a text from a state, or from the start."""


def draw_text(draw: Random, vocabulary: int, factor: int) -> Text:
    """Return rows of random tokens, of which some start documents: in some rows none, in others every second one, or
    one in two blocks of `factor` tokens."""
    longest = draw.choice((36,) * 14 + (160,) * 3 + (600,))
    blocks = factor * draw.randint(1, 3) + draw.randint(1, 20)
    rows, time = draw.randint(1, 4), max(draw.randint(AFTER + 1, longest), blocks)
    documents = torch.tensor([[draw.choice((0, 0, 1, 3, min(time, 30 * factor) / 2 / factor))] for _ in range(rows)])
    noise = torch.Generator().manual_seed(draw.randrange(2**32))
    starts = torch.rand(rows, time, generator=noise) < documents / time
    position = torch.tensor([draw.choice((0, 0, draw.randrange(10**6))) for _ in range(rows)])
    return Text(torch.randint(vocabulary, (rows, time), generator=noise), starts, position)


@torch.no_grad()
def read(model: LanguageModel, text: Text, way: Way) -> Outcome:
    return way(model, text, model.init_state(len(text.tokens))._replace(position=text.position))


def at_once(model: LanguageModel, text: Text, state: ModelState) -> Outcome:
    return Outcome(*predict(model, text.tokens, state, text.document_starts))


def without_starts(model: LanguageModel, text: Text, state: ModelState) -> Outcome:
    """Read all at once, without a word on documents where none starts."""
    return Outcome(*predict(model, text.tokens, state, text.document_starts if text.document_starts.any() else None))


def by_token(model: LanguageModel, text: Text, state: ModelState) -> Outcome:
    """Read token by token. Where a document starts in a row, the token is read: a step knows of no documents."""
    logits = []
    for time in range(text.tokens.shape[1]):
        token = text.cut(time, time + 1)
        if token.document_starts.any():
            found, state = at_once(model, token, state)
        else:
            found, state = step(model, token.tokens[:, 0], state)
            found = found[:, None]
        logits.append(found)
    return Outcome(torch.cat(logits, dim=1), state)


def row_by_row(way: Way) -> Way:
    """Return a way in which each row is read alone, its state cut out of the others' and put back."""

    def apart(model: LanguageModel, text: Text, state: ModelState) -> Outcome:
        rows = [way(model, text.row(row), state_row(state, row)) for row in range(len(text.tokens))]
        return Outcome(torch.cat([row.logits for row in rows]), concat_states([row.state for row in rows]))

    return apart


def by_document(model: LanguageModel, text: Text, state: ModelState) -> Outcome:
    """Read each document alone, which gives no state after all of them."""
    rows = []
    for row in range(len(text.tokens)):
        begins = sorted({0, *text.document_starts[row].nonzero().flatten().tolist()})
        before = None if text.document_starts[row, 0] else state_row(state, row)
        logits = []
        for begin, end in pairwise([*begins, text.tokens.shape[1]]):
            logits.append(predict(model, text.tokens[row : row + 1, begin:end], before)[0])
            before = None
        rows.append(torch.cat(logits, dim=1))
    return Outcome(torch.cat(rows), None)


def in_turn(ends: Sequence[int], ways: Sequence[Way]) -> Way:
    """Return a way in which each part of a text, up to its end, is read in a way of its own, the state passed on."""

    def parts(model: LanguageModel, text: Text, state: ModelState) -> Outcome:
        logits = []
        for (begin, end), way in zip(pairwise([0, *ends]), ways, strict=True):
            if begin < end:
                found, state = way(model, text.cut(begin, end), state)
                logits.append(found)
        return Outcome(torch.cat(logits, dim=1), state)

    return parts


def token_by_token(model: LanguageModel, text: Text) -> Way:
    """Return the way that decodes the last tokens one by one."""
    time = text.tokens.shape[1]
    end = time if model.constant_state else time - AFTER
    return in_turn([max(0, end - STEPS), end, time], [at_once, by_token, at_once])


def draw_parts(draw: Random, model: LanguageModel, text: Text) -> Way:
    """Return a way with random parts, in which rows are read together or alone."""
    time = text.tokens.shape[1]
    ends = sorted(draw.randint(0, time - AFTER) for _ in range(draw.randint(1, 5)))
    ways: list[Way] = []
    for begin, end in pairwise([0, *ends]):
        way = draw.choice((at_once, without_starts, *([by_token] if end - begin < 8 else [])))
        ways.append(draw.choice((way, way, row_by_row(way))))
    last = at_once if not model.constant_state else draw.choice((at_once, by_token, row_by_row(by_token)))
    return in_turn([*ends, time - AFTER, time], [*ways, without_starts, last])
