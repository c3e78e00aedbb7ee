"""n-gram attention of one token.

B batch, H heads, V value dim, R rows, L most recent values.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from lmlong.attention.ngram.hashing import NO_NGRAM, row_of
from lmlong.attention.ngram.native.kernel import scan
from lmlong.attention.ngram.state import NgramState, no_recent, rows_at


def step(v: Tensor, hashes: Tensor, state: NgramState) -> tuple[Tensor, Tensor, NgramState]:
    """Return the sum (B, H, 1, V) and the number (B, H, 1) of the values in the row that a token reads, and the state
    after."""
    if v.device.type != "cpu":
        return _in_table(v, hashes, state)
    sums, numbers, state = _with_recent(v, hashes, state)
    return sums, numbers, settle_full(state)


def settle_full(state: NgramState) -> NgramState:
    """Return the state with room for one more recent value."""
    return settle(state) if bool((state.recent_ngram[..., 0] != NO_NGRAM).any()) else state


def settle(state: NgramState) -> NgramState:
    """Return the state with all values in its table."""
    if state.S.device.type != "cpu" or bool((state.recent_ngram[..., -1] == NO_NGRAM).all()):
        return state
    followed = pad(state.recent_ngram[..., 1:], (0, 1), value=NO_NGRAM)
    _, _, after = scan(state.recent_v, torch.stack([state.recent_ngram, followed], dim=-1), None, state)
    recent = no_recent(state.S.shape[:2], state.S.shape[-1], state.S.device, state.recent_v.dtype)
    return after._replace(recent_ngram=recent[0], recent_v=recent[1])


def _in_table(v: Tensor, hashes: Tensor, state: NgramState) -> tuple[Tensor, Tensor, NgramState]:
    """Write to a copy of the table, without a look at any value, as a CUDA graph needs it."""
    written, read = hashes.unbind(-1)  # (B, H, 1)
    row = row_of(written.clamp_min(0), state.number.shape[-1])
    S, number, ngram = _at(row, state)
    writes, keeps = written != NO_NGRAM, ngram == written
    new_S = S.masked_fill(~keeps[..., None], 0) + v.to(S.dtype)
    state = state._replace(
        S=state.S.scatter(2, rows_at(row, v), torch.where(writes[..., None], new_S, S)),
        number=state.number.scatter(2, row, torch.where(writes, number * keeps + 1, number)),
        ngram=state.ngram.scatter(2, row, torch.where(writes, written, ngram)),
    )
    S, number, ngram = _at(row_of(read.clamp_min(0), state.number.shape[-1]), state)
    found = (ngram == read) & (read != NO_NGRAM)
    return S.masked_fill(~found[..., None], 0), (number * found).to(S.dtype), state


def _at(row: Tensor, state: NgramState) -> tuple[Tensor, Tensor, Tensor]:
    """Return sums, numbers and n-grams of the table's rows (B, H, 1)."""
    return state.S.gather(2, rows_at(row, state.S)), state.number.gather(2, row), state.ngram.gather(2, row)


def _with_recent(v: Tensor, hashes: Tensor, state: NgramState) -> tuple[Tensor, Tensor, NgramState]:
    """Append the value to those that are not in the table yet, of which the oldest is none."""
    written, read = hashes.unbind(-1)  # (B, H, 1)
    writes = written != NO_NGRAM
    recent = torch.where(writes, torch.cat([state.recent_ngram[..., 1:], written], dim=-1), state.recent_ngram)
    values = torch.cat([state.recent_v[:, :, 1:], v.to(state.recent_v.dtype)], dim=2)
    values = torch.where(writes[..., None], values, state.recent_v)
    buckets = state.number.shape[-1]
    row = row_of(read.clamp_min(0), buckets)
    same = (recent == read) & (recent != NO_NGRAM)
    cleared = (row_of(recent.clamp_min(0), buckets) == row) & (recent != NO_NGRAM) & ~same
    order = torch.arange(recent.shape[-1])
    since = torch.where(cleared, order, -1).amax(-1, keepdim=True)
    used = same & (order > since)
    S, number, ngram = _at(row, state)
    in_table = (since < 0) & (ngram == read) & (read != NO_NGRAM)
    sums = S.masked_fill(~in_table[..., None], 0) + values.masked_fill(~used[..., None], 0).sum(2, keepdim=True)
    numbers = number * in_table + used.sum(-1, keepdim=True)
    return sums, numbers.to(sums.dtype), state._replace(recent_ngram=recent, recent_v=values)
