"""A session: the state after a text and its last tokens, everything needed to continue, of constant size.

N tokens, V vocabulary.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lmlong.decode.engine import step
from lmlong.inference.unread import UnreadText
from lmlong.model.finite import NotFinite, is_finite, not_finite
from lmlong.model.language_model import LanguageModel, ModelState
from lmlong.model.learning import read as reading
from lmlong.model.sampling_options import RECENT
from lmlong.model.state import state_bytes

PREFILL_TOKENS = 2048
"""Tokens of a prompt read at once, or more on a GPU, so that a text of any length takes the memory of this many."""

NO_TOKEN = -1
"""Stands for tokens before the beginning of the text."""


class Session(NamedTuple):
    """A text up to its last token, which is known but not yet read, and unread text whose tokens depend on what
    follows."""

    state: ModelState  # of all tokens but the last, of one row
    recent: tuple[int, ...]  # the last tokens, up to RECENT
    total: int  # number of tokens
    unread: UnreadText = UnreadText()  # text after the last token

    @property
    def last(self) -> int:
        return self.recent[-1]

    def __repr__(self) -> str:
        return f"<Session after {self.total:,} tokens, with {state_bytes(self.state):,} bytes of state>"


def prefill(
    model: LanguageModel,
    pieces: Iterable[Sequence[int]],
    session: Session | None = None,
    learn: bool = False,
) -> Session:
    """Return the session after tokens in pieces of any size, starting from `session` if given. `learn`:
    whether a new session learns from its text."""
    for piece in even_pieces(pieces, model.piece(1, PREFILL_TOKENS)):
        if session is None:
            session, piece = first(model, piece[0], learn), piece[1:]
        if piece:
            session = read_tokens(model, piece, session)
    assert session is not None, "nothing to read"
    return session


def even_pieces(pieces: Iterable[Sequence[int]], size: int = PREFILL_TOKENS) -> Iterator[list[int]]:
    """Iterate over the same tokens in pieces of one size; the last piece may be smaller."""
    held: list[int] = []
    for piece in pieces:
        held.extend(piece)
        while len(held) > size:
            yield held[:size]
            held = held[size:]
    if held:
        yield held


@torch.inference_mode()
def first(model: LanguageModel, token: int, learn: bool = False) -> Session:
    """Return the session after the first token of a text."""
    return Session(reading.first_state(model, 1, learn), (token,), 1)


def last_tokens(tokens: Sequence[int], size: int) -> list[int]:
    """Return the last `size` tokens of a text, after NO_TOKEN if they are fewer."""
    last = [*tokens][-size:]
    return [NO_TOKEN] * (size - len(last)) + last


@torch.inference_mode()
def read_tokens(model: LanguageModel, tokens: Sequence[int], session: Session) -> Session:
    """Return the session after new tokens. Raise NotFinite if the model gives values that are not finite."""
    read = torch.tensor([[session.last, *tokens[:-1]]], device=session.state.position.device)
    hidden, state = reading.read(model, read, session.state)
    if not is_finite(hidden):
        raise not_finite(model, read, reading.unlearned(session.state))
    return after_tokens(session, tokens, state)


@torch.inference_mode()
def score_tokens(model: LanguageModel, tokens: Sequence[int], session: Session) -> tuple[Session, Tensor]:
    """Return the session after new tokens, and -log p of each (1, N)."""
    device = session.state.position.device
    read, new = torch.tensor([[session.last, *tokens[:-1]]], device=device), torch.tensor([tokens], device=device)
    nll, state = reading.score(model, read, new, session.state)
    return after_tokens(session, tokens, state), nll


def after_tokens(session: Session, new: Sequence[int], state: ModelState) -> Session:
    """Return the session after new tokens, with the state after all but the last."""
    recent = (*session.recent, *new)[-RECENT:]
    return Session(state, recent, session.total + len(new), session.unread)


@torch.inference_mode()
def next_logits(model: LanguageModel, session: Session) -> tuple[Tensor, ModelState]:
    """Return the logits (1, V) of the next token, and the state after the last one."""
    return step(model, torch.tensor([session.last], device=session.state.position.device), session.state)


def logits_not_finite(model: LanguageModel, recent: Iterable[int]) -> NotFinite:
    """Return the error for logits that are not finite after recent tokens."""
    return not_finite(model, torch.tensor([[*recent]], device=model.embedding.weight.device))


def append_token(session: Session, state: ModelState, token: int, learn: bool = False) -> Session:
    """Return the session with one more token, after `next_logits` gave `state`. `learn`: whether a state that learns
    from its text learns from the token, which is not for those that the model wrote."""
    return after_tokens(session, [token], reading.will_learn(state, learn))


def greedy(model: LanguageModel, session: Session, tokens: int) -> Session:
    """Return the session after as many more tokens, each the likeliest."""
    for _ in range(tokens):
        logits, state = next_logits(model, session)
        session = append_token(session, state, int(logits.argmax()))
    return session


def advance(model: LanguageModel, session: Session, tokens: Iterable[tuple[int, bool]]) -> Session:
    """Return the session after more tokens, each read by a decode step as in generation; and each with
    whether a state that learns from its text learns from it."""
    for token, learn in tokens:
        _, state = next_logits(model, session)
        session = append_token(session, state, token, learn)
    return session


def begin_learning(model: LanguageModel, session: Session, learn: bool) -> Session:
    """Return a session that learns from the text that follows, if it does not do so already."""
    if not learn or session.state.learned is not None:
        return session
    return session._replace(state=reading.begin_learning(model, session.state))
