"""Texts of different lengths, read side by side.

They end together: a shorter one is padded in front by tokens of another document, which a model forgets.

B rows, T time.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lmlong.inference.session import NO_TOKEN, PREFILL_TOKENS, Session
from lmlong.inference.unread import Unread, UnreadText, as_tensors
from lmlong.model.language_model import LanguageModel, ModelState
from lmlong.model.sampling_options import RECENT
from lmlong.model.state import state_bytes, where_state

MOST_ROWS = 64
"""Most texts that are read side by side."""

STATES_AT_ONCE = 1 << 27
"""Most bytes of their states, beyond which copying them takes longer than reading gains."""

TOKENS_AT_ONCE = 16_384
"""Most tokens of all texts in one piece."""


def rows_at_once(model: LanguageModel) -> int:
    """Return how many texts pay to be read side by side, as far as their states matter."""
    return max(1, min(MOST_ROWS, STATES_AT_ONCE // max(1, state_bytes(model.init_state(1)))))


def batches(model: LanguageModel, sizes: Sequence[int], rows: int | None = None) -> Iterator[slice]:
    """Cut texts, sorted with the longest first, into those that are read side by side: `rows` of them, or by default as
    many as pay."""
    most, begin = rows_at_once(model), 0
    while begin < len(sizes):
        piece = min(max(1, sizes[begin]), PREFILL_TOKENS)
        end = begin + (rows or min(most, TOKENS_AT_ONCE // piece))
        yield slice(begin, end)
        begin = end


@torch.inference_mode()
def read_rows(model: LanguageModel, rows: Sequence[Sequence[int]]) -> tuple[Tensor, ModelState]:
    """Return the last hidden state (B, width) of each text, of one token or more, and the state after it."""
    device = model.embedding.weight.device
    longest = max(map(len, rows))
    tokens = torch.tensor([[0] * (longest - len(row)) + list(row) for row in rows], device=device)
    begins = torch.tensor([[longest - len(row)] for row in rows], device=device)
    starts = torch.arange(longest, device=device) == begins if begins.any() else None
    state, last = model.init_state(len(rows)), None
    for begin in range(0, longest, PREFILL_TOKENS):
        piece = slice(begin, begin + PREFILL_TOKENS)
        hidden, state = model.hidden_states(tokens[:, piece], state, None if starts is None else starts[:, piece])
        last = hidden[:, -1]
    assert last is not None, "nothing to read"
    return last, state


@torch.inference_mode()
def prefill_rows(model: LanguageModel, rows: Sequence[Sequence[int]]) -> Session:
    """Return the session after texts, of one token or more, from none."""
    device = model.embedding.weight.device
    state = model.init_state(len(rows))
    more = torch.tensor([len(row) > 1 for row in rows], device=device)
    if more.any():
        _, read = read_rows(model, [row[:-1] or row for row in rows])
        state = where_state(more, read, state)
    recent = [[NO_TOKEN] * (RECENT - len(row)) + list(row[-RECENT:]) for row in rows]
    nothing = as_tensors(UnreadText(), device)
    return Session(
        state=state,
        last=torch.tensor([row[-1] for row in rows], device=device),
        recent=torch.tensor(recent, device=device),
        total=torch.tensor([len(row) for row in rows], device=device),
        unread=Unread(*(part.repeat(len(rows), 1) for part in nothing)),
    )
