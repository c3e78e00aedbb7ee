"""A session: the state after a text and its last tokens, everything needed to continue, of constant size.

B rows, V vocabulary.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lmlong.attention.base import state_tensors
from lmlong.inference.unread import Unread, UnreadText, as_tensors
from lmlong.model.language_model import LanguageModel, ModelState
from lmlong.model.sampling_options import RECENT
from lmlong.model.state import rebuild_state

PREFILL_TOKENS = 2048
"""Tokens of a prompt read at once, or more on a GPU, so that a text of any length takes the memory of this many."""

NO_TOKEN = -1
"""Stands for tokens before the beginning of the text."""


class Session(NamedTuple):
    """A text up to its last token, which is known but not yet read, and unread text whose tokens depend on what
    follows."""

    state: ModelState  # of all tokens but the last
    last: Tensor  # (B,) the last token
    recent: Tensor  # (B, RECENT) the last tokens, including `last`; NO_TOKEN before the beginning
    total: Tensor  # (B,) number of tokens, including `last`
    unread: Unread  # text after `last`


def prefill(model: LanguageModel, pieces: Iterable[Sequence[int]], session: Session | None = None) -> Session:
    """Return the session of one row after tokens in pieces of any size, starting from `session` if given."""
    after = session
    for now in prefill_pieces(model, pieces, session):
        after = now
    assert after is not None, "nothing to read"
    return after


def prefill_pieces(
    model: LanguageModel, pieces: Iterable[Sequence[int]], session: Session | None = None, size: int | None = None
) -> Iterator[Session]:
    """Iterate over the session after every `size` tokens and after the last, for a caller with other work in
    between."""
    for piece in even_pieces(pieces, size or model.piece(1, PREFILL_TOKENS)):
        session = _read(model, piece, session)
        yield session


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


def _read(model: LanguageModel, tokens: list[int], session: Session | None) -> Session:
    """Return the session after new tokens, starting from `session` if given."""
    if session is None:
        session, tokens = first(model, tokens[0]), tokens[1:]
    return read_tokens(model, tokens, session)[0] if tokens else session


@torch.inference_mode()
def first(model: LanguageModel, token: int) -> Session:
    """Return the session of one row after its first token."""
    last = torch.tensor([token], device=model.embedding.weight.device)
    recent = torch.cat([last.new_full((1, RECENT - 1), NO_TOKEN), last[:, None]], dim=1)
    unread = as_tensors(UnreadText(), last.device)
    return Session(model.init_state(1), last, recent, torch.ones_like(last), unread)


@torch.inference_mode()
def read_tokens(model: LanguageModel, tokens: Sequence[int], session: Session) -> tuple[Session, Tensor]:
    """Return the session after new tokens, and the hidden states (1, N, width) that predict each of them."""
    new = torch.tensor([tokens], device=model.embedding.weight.device)
    unread = torch.cat([session.last[:, None], new[:, :-1]], dim=1)
    hidden, state = model.hidden_states(unread, session.state)
    recent = torch.cat([session.recent, new], dim=1)[:, -RECENT:].clone()
    total = session.total + new.shape[1]
    return session._replace(state=state, last=new[:, -1].clone(), recent=recent, total=total), hidden


@torch.inference_mode()
def next_logits(model: LanguageModel, session: Session) -> tuple[Tensor, ModelState]:
    """Return the logits (B, V) of the next token, and the state after the last one."""
    return model.step(session.last, session.state)


@torch.inference_mode()
def append_token(session: Session, state: ModelState, token: Tensor) -> Session:
    """Return the session with one more token (B,), after `next_logits` gave `state`."""
    recent = torch.cat([session.recent[:, 1:], token[:, None]], dim=1)
    return session._replace(state=state, last=token, recent=recent, total=session.total + 1)


def advance(model: LanguageModel, session: Session, tokens: Iterable[int]) -> Session:
    """Return the session of one row after more tokens, each read by a decode step as in generation."""
    for token in tokens:
        _, state = next_logits(model, session)
        session = append_token(session, state, session.last.new_tensor([token]))
    return session


def with_unread(session: Session, text: UnreadText) -> Session:
    """Return the session of one row with this unread text."""
    return session._replace(unread=as_tensors(text, session.last.device))


def repeat_rows(session: Session, times: int) -> Session:
    """Return the session with each row repeated `times` times in adjacent rows."""
    return rebuild_state(session, iter([x.repeat_interleave(times, dim=0) for x in state_tensors(session)]))
