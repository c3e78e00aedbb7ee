"""Texts of different lengths, read in one batch.

They are aligned at their ends: shorter texts are padded in front by another document, which the model forgets.

B rows, T time.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lmlong.inference.session import PREFILL_TOKENS, Session
from lmlong.model.language_model import LanguageModel, ModelState
from lmlong.model.sampling_options import RECENT
from lmlong.model.state import state_bytes, state_row

MAX_ROWS = 64
"""Maximum number of texts in a batch."""

MAX_STATE_BYTES = 1 << 27
"""Maximum bytes of their states; copying more takes longer than batching saves."""

MAX_PIECE_TOKENS = 16_384
"""Maximum number of tokens of all texts in one piece."""


def rows_at_once(model: LanguageModel) -> int:
    """Return how many texts are worth reading in one batch, by the size of their states."""
    return max(1, min(MAX_ROWS, MAX_STATE_BYTES // max(1, state_bytes(model.init_state(1)))))


def batches(model: LanguageModel, sizes: Sequence[int], rows: int | None = None) -> Iterator[slice]:
    """Divide texts, sorted longest first, into batches of `rows` texts, or by default of as many as are worthwhile."""
    most, begin = rows_at_once(model), 0
    while begin < len(sizes):
        piece = min(max(1, sizes[begin]), PREFILL_TOKENS)
        end = begin + (rows or min(most, MAX_PIECE_TOKENS // piece))
        yield slice(begin, end)
        begin = end


@torch.inference_mode()
def read_rows(model: LanguageModel, rows: Sequence[Sequence[int]]) -> tuple[Tensor, ModelState]:
    """Return the last hidden state (B, width) of each text, of at least one token, and the state after it."""
    device = model.embedding.weight.device
    longest = max(map(len, rows))
    tokens = torch.tensor([[0] * (longest - len(row)) + list(row) for row in rows], device=device)
    begins = torch.tensor([[longest - len(row)] for row in rows], device=device)
    starts = torch.arange(longest, device=device) == begins if begins.any() else None
    state, last, size = model.init_state(len(rows)), None, model.piece(len(rows), PREFILL_TOKENS)
    for begin in range(0, longest, size):
        piece = slice(begin, begin + size)
        hidden, state = model(tokens[:, piece], state, None if starts is None else starts[:, piece])
        last = hidden[:, -1]
    assert last is not None, "nothing to read"
    return last, state


@torch.inference_mode()
def prefill_rows(model: LanguageModel, rows: Sequence[Sequence[int]]) -> list[Session]:
    """Return the sessions after texts of at least one token, from the empty state."""
    states = [model.init_state(1) for _ in rows]
    if longer := [number for number, row in enumerate(rows) if len(row) > 1]:
        _, read = read_rows(model, [rows[number][:-1] for number in longer])
        for index, number in enumerate(longer):
            states[number] = state_row(read, index)
    return [Session(state, tuple(row[-RECENT:]), len(row)) for state, row in zip(states, rows, strict=True)]
