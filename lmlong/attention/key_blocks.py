"""The keys that each query sees, an interval of them, and lists of the blocks of keys that hold these.

The lists are made by a number of operations that does not depend on the length, and without reading a value.

B batch, T queries, S keys, P past tokens, M blocks of queries, N blocks of keys.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 128
"""Queries and keys in a block, the default of flex_attention."""


class VisibleKeys(NamedTuple):
    """The keys that each query sees: those in use from `first` to `last`. Neither is smaller for a later query."""

    first: Tensor  # (B, T) int32
    last: Tensor  # (T,) int32
    in_use: Tensor  # (B, S) bool

    def mask(self) -> Tensor:
        """Return (B, T, S), true if the query sees the key."""
        key = torch.arange(self.in_use.shape[1], dtype=torch.int32, device=self.last.device)
        return (self.first[..., None] <= key) & (key <= self.last[:, None]) & self.in_use[:, None]

    def of_last_query(self, begin: int) -> Tensor:
        """Return (B, S - begin), true if the last query sees the key, of the keys from `begin` on; none is later."""
        key = torch.arange(begin, self.in_use.shape[1], dtype=torch.int32, device=self.last.device)
        return (self.first[:, -1:] <= key) & self.in_use[:, begin:]


class BlockList(NamedTuple):
    """For each row of blocks, the columns of the blocks in the list, followed by those of all other blocks."""

    length: Tensor  # (B, 1, M) int32
    columns: Tensor  # (B, 1, M, N) int32


class BlockLists(NamedTuple):
    """The blocks that some query sees in part and those that all queries see whole: by blocks of queries, for the
    forward pass, and by blocks of keys, for the backward pass."""

    partial: BlockList
    full: BlockList
    partial_by_key: BlockList
    full_by_key: BlockList


def visible_keys(current: Tensor, document_starts: Tensor | None, time: int, window: int | None = None) -> VisibleKeys:
    """Return the keys that each of `time` tokens sees: the tokens of its document so far, at most `window`. The first
    keys are past tokens, and `current` (B, P) is true for those of the document that the first token continues."""
    past = current.shape[1]
    last = torch.arange(past, past + time, dtype=torch.int32, device=current.device)
    if document_starts is None:
        first = last.new_zeros(len(current), time)
    else:
        first = torch.where(document_starts, last, 0).cummax(dim=1).values
    if window is not None:
        first = first.maximum(last - (window - 1))
    return VisibleKeys(first, last, torch.cat([current, current.new_ones(len(current), time)], dim=1))


def block_lists(visible: VisibleKeys) -> BlockLists:
    first, last, in_use = visible
    begin = torch.arange(0, in_use.shape[1], BLOCK, dtype=torch.int32, device=last.device)  # (N,) of each block of keys
    end = begin + BLOCK - 1
    # the intervals of the first and the last query of each block of queries bound those of all its queries
    top = torch.arange(0, len(last), BLOCK, device=last.device)
    bottom = (top + BLOCK - 1).clamp(max=len(last) - 1)
    blocks_in_use = pad(in_use, (0, -in_use.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    seen = (begin <= last[bottom, None]) & (end >= first[:, top, None]) & blocks_in_use.any(2)[:, None]
    full = (begin >= first[:, bottom, None]) & (end <= last[top, None]) & blocks_in_use.all(2)[:, None]
    partial = seen & ~full
    return BlockLists(*map(_listed, (partial, full, partial.mT, full.mT)))


def _listed(blocks: Tensor) -> BlockList:
    """Return the list of the blocks (B, M, N) that are true."""
    columns = blocks.byte().argsort(dim=2, descending=True, stable=True)  # a GPU does not sort bool
    return BlockList(blocks.sum(2, dtype=torch.int32)[:, None], columns.int().contiguous()[:, None])
