"""The decode step of n-gram attention by torch.

B batch, H heads, V value dim, R rows, L most recent values, W waiting values.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from lmlong.attention.device_policy import DevicePolicy
from lmlong.attention.ngram.hashing import NO_NGRAM, row_of
from lmlong.attention.ngram.native.kernel import NativeNgram
from lmlong.attention.ngram.state import RECENT, NgramState, OwnedNgramState, rows_at, without_lists


def step(v: Tensor, hashes: Tensor, state: NgramState, policy: DevicePolicy) -> tuple[Tensor, Tensor, NgramState]:
    """Return the sum (B, H, 1, V) and the number (B, H, 1) of the values in the row that a token reads, and the state
    after."""
    if policy.reads_values and not isinstance(state, OwnedNgramState):
        sums, numbers, state = _with_lists(v, hashes, state)
        return sums, numbers, make_room(state)
    return _in_table(v, hashes, state)


def make_room(state: NgramState) -> NgramState:
    """Move the recent values of a full list to the waiting values or to the table, so that there is room for more."""
    if not bool((state.recent_ngram[..., 0] != NO_NGRAM).any()):
        return state
    if bool((state.waiting_ngram[..., :RECENT] != NO_NGRAM).any()):
        return _with_table(state)
    return state._replace(
        waiting_ngram=torch.cat([state.waiting_ngram[:, :, RECENT:], state.recent_ngram], dim=2),
        waiting_v=torch.cat([state.waiting_v[:, :, RECENT:], state.recent_v], dim=2),
        recent_ngram=torch.full_like(state.recent_ngram, NO_NGRAM),
        recent_v=torch.zeros_like(state.recent_v),
    )


def settle(state: NgramState, policy: DevicePolicy) -> NgramState:
    """Return the state with all values in its table."""
    if not policy.reads_values:
        return state
    if all(bool((ngrams == NO_NGRAM).all()) for ngrams in (state.recent_ngram, state.waiting_ngram)):
        return state
    return _with_table(state)


def _with_table(state: NgramState) -> NgramState:
    """Write the values of both lists to the table."""
    ngrams, values = _listed(state)
    followed = pad(ngrams[..., 1:], (0, 1), value=NO_NGRAM)
    hashes = torch.stack([ngrams, followed], dim=-1)
    return without_lists(NativeNgram().read(values, hashes, None, state)[2])


def _listed(state: NgramState) -> tuple[Tensor, Tensor]:
    """Return the n-grams (B, H, W + L) and values (B, H, W + L, V) that are not in the table yet."""
    return (
        torch.cat([state.waiting_ngram, state.recent_ngram], dim=2),
        torch.cat([state.waiting_v, state.recent_v], dim=2),
    )


def _in_table(v: Tensor, hashes: Tensor, state: NgramState) -> tuple[Tensor, Tensor, NgramState]:
    """Write to a copy of the table, or to the table of a state that an engine owns. No value is read, so that it can be
    part of a CUDA graph."""
    scatter = Tensor.scatter_ if isinstance(state, OwnedNgramState) else Tensor.scatter
    written, read = hashes.unbind(-1)  # (B, H, 1)
    row = row_of(written.clamp_min(0), state.number.shape[-1])
    S, number, ngram = _at(row, state)
    writes, keeps = written != NO_NGRAM, ngram == written
    new_S = S.masked_fill(~keeps[..., None], 0) + v.to(S.dtype)
    state = state._replace(
        S=scatter(state.S, 2, rows_at(row, v), torch.where(writes[..., None], new_S, S)),
        number=scatter(state.number, 2, row, torch.where(writes, number * keeps + 1, number)),
        ngram=scatter(state.ngram, 2, row, torch.where(writes, written, ngram)),
    )
    S, number, ngram = _at(row_of(read.clamp_min(0), state.number.shape[-1]), state)
    matches = (ngram == read) & (read != NO_NGRAM)
    return S.masked_fill(~matches[..., None], 0), (number * matches).to(S.dtype), state


def _at(row: Tensor, state: NgramState) -> tuple[Tensor, Tensor, Tensor]:
    """Return sums, numbers and n-grams of the table's rows (B, H, 1)."""
    return state.S.gather(2, rows_at(row, state.S)), state.number.gather(2, row), state.ngram.gather(2, row)


def _with_lists(v: Tensor, hashes: Tensor, state: NgramState) -> tuple[Tensor, Tensor, NgramState]:
    """Append the value to the recent values, whose oldest slot must be empty."""
    written, read = hashes.unbind(-1)  # (B, H, 1)
    writes = written != NO_NGRAM
    recent = torch.where(writes, torch.cat([state.recent_ngram[..., 1:], written], dim=-1), state.recent_ngram)
    values = torch.cat([state.recent_v[:, :, 1:], v.to(state.recent_v.dtype)], dim=2)
    state = state._replace(recent_ngram=recent, recent_v=torch.where(writes[..., None], values, state.recent_v))
    ngrams, values = _listed(state)
    buckets = state.number.shape[-1]
    row = row_of(read.clamp_min(0), buckets)
    same = (ngrams == read) & (ngrams != NO_NGRAM)
    cleared = (row_of(ngrams.clamp_min(0), buckets) == row) & (ngrams != NO_NGRAM) & ~same
    order = torch.arange(ngrams.shape[-1])
    since = torch.where(cleared, order, -1).amax(-1, keepdim=True)
    used = same & (order > since)
    S, number, ngram = _at(row, state)
    in_table = (since < 0) & (ngram == read) & (read != NO_NGRAM)
    sums = S.masked_fill(~in_table[..., None], 0) + values.masked_fill(~used[..., None], 0).sum(2, keepdim=True)
    numbers = number * in_table + used.sum(-1, keepdim=True)
    return sums, numbers.to(sums.dtype), state
