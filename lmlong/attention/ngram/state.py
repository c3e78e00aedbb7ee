"""The state of n-gram attention: a table with a row for each n-gram, and the last values, which are not in it yet.

A step writes to only one row of a large table. To avoid copying the table, on a CPU the value is appended to a short
list, the recent values. A full list is moved to a longer list, the waiting values. When that is full too, all values
are written to a copy of the table. On a GPU no value is read, so nothing knows when a list is full: there a step writes
to the table, and the lists stay empty.

B batch, H heads, V value dim, R rows, L most recent values, W waiting values.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lmlong.attention.ngram.hashing import MAX_HASH, NO_NGRAM, row_of
from lmlong.attention.state_check import StateError, check_range

RECENT, WAITING = 32, 1024
"""L and W. For each token, copying the recent values (every token), the waiting values (every L tokens) and a table of
usual size (every W tokens) costs about the same."""


class NgramState(NamedTuple):
    S: Tensor  # (B, H, R, V) sum of the values that followed the n-gram of each row, float32 or more
    number: Tensor  # (B, H, R) number of these values
    ngram: Tensor  # (B, H, R) hash of the row's n-gram, NO_NGRAM for an empty row
    waiting_ngram: Tensor  # (B, H, W) the n-gram before each waiting value, the newest last, NO_NGRAM for no value
    waiting_v: Tensor  # (B, H, W, V) the waiting values
    recent_ngram: Tensor  # (B, H, L) the n-gram before each recent value, in the same way
    recent_v: Tensor  # (B, H, L, V) the recent values, which follow the waiting ones

    def validate(self) -> None:
        """Raise StateError unless hashes are in range and each n-gram of the table is in its own row."""
        for name in ("ngram", "waiting_ngram", "recent_ngram"):
            check_range(name, getattr(self, name), NO_NGRAM, MAX_HASH)
        check_range("number", self.number, 0, torch.iinfo(self.number.dtype).max)
        used = self.ngram != NO_NGRAM
        if not torch.equal(used, self.number > 0):
            raise StateError("number is above 0 in a row without an n-gram, or 0 in a row with one")
        rows = torch.arange(self.ngram.shape[-1], device=used.device)
        if bool((used & (row_of(self.ngram, len(rows)) != rows)).any()):
            raise StateError("ngram has an n-gram in a row that does not match its hash")


class NgramEffect(NamedTuple):
    """What tokens do to the table: its rows after them if it was empty before, and which of these continue a row."""

    S: Tensor  # (B, H, R, V)
    number: Tensor  # (B, H, R)
    ngram: Tensor  # (B, H, R)
    single: Tensor  # (B, H, R) bool, whether no other n-gram wrote to the row
    begun: Tensor  # (B,) bool, whether a document starts in the tokens, which clears the state before


class OwnedNgramState(NgramState):
    """A state that belongs to a decode engine alone. A step writes to its table in place."""

    __slots__ = ()


def empty_state(shape: Sequence[int], value_dim: int, device: torch.device, dtype: torch.dtype) -> NgramState:
    """Return the state (B, H, R) in which no n-gram has been seen."""
    return NgramState(
        untouched_zeros((*shape, value_dim), device, dtype),
        torch.zeros(*shape, device=device, dtype=torch.int32),
        torch.full(shape, NO_NGRAM, device=device),
        *_no_values(WAITING, shape[:2], value_dim, device, dtype),
        *_no_values(RECENT, shape[:2], value_dim, device, dtype),
    )


def without_lists(state: NgramState) -> NgramState:
    """Return the state with empty lists."""
    like = state.S.shape[:2], state.S.shape[-1], state.S.device, state.recent_v.dtype
    return NgramState(*state[:3], *_no_values(WAITING, *like), *_no_values(RECENT, *like))


def _no_values(
    count: int, shape: Sequence[int], value_dim: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    ngrams = torch.full((*shape, count), NO_NGRAM, device=device)
    return ngrams, untouched_zeros((*shape, count, value_dim), device, dtype)


def untouched_zeros(shape: Sequence[int], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return zeros. On a CPU their memory is allocated at the first write, since few rows of a large table are used."""
    if device.type != "cpu" or dtype != torch.float32:
        return torch.zeros(shape, device=device, dtype=dtype)
    return torch.from_numpy(np.zeros(shape, np.float32))


def rows_at(index: Tensor, like: Tensor) -> Tensor:
    """Expand an index (B, H, T) of rows of `like` (B, H, R, V) to (B, H, T, V), as `gather` needs."""
    return index[..., None].expand(*index.shape, like.shape[-1])
