"""The state of softmax attention: the keys and values of all tokens, with recent tokens in separate tensors.

B batch, G key/value heads, P past tokens, K key dim, V value dim.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lmlong.attention.state_check import StateError

BLOCK = 128
"""Recent tokens are collected up to this number, then appended to the settled ones: copying all settled tokens for each
new token would cost more than attending to them."""


class KeyValues(NamedTuple):
    """The keys and values of past tokens."""

    k: Tensor  # (B, G, P, K)
    v: Tensor  # (B, G, P, V)
    current: Tensor  # (B, P) bool, true for tokens of the row's current document

    def to(self, dtype: torch.dtype) -> "KeyValues":
        return KeyValues(self.k.to(dtype), self.v.to(dtype), self.current)

    def validate(self) -> None:
        keys, values, marks = self.k.shape[2], self.v.shape[2], self.current.shape[1]
        if not keys == values == marks:
            raise StateError(f"current has {marks} tokens, but there are {keys} keys and {values} values")


class KVCache(NamedTuple):
    settled: KeyValues
    recent: KeyValues  # at most BLOCK


class SoftmaxEffect(NamedTuple):
    """What a part of a text adds to the state. Zeros after its last token are not current, so they add nothing."""

    tokens: KeyValues  # `current` for tokens of the part's last document
    begun: Tensor  # (B,) bool, whether a document starts in the part


def with_room(state: KVCache) -> KVCache:
    """Return the state after a step. Recent tokens are settled when they fill a block, the only step that waits for a
    GPU: the new sizes depend on which tokens are unused."""
    return state if state.recent.k.shape[2] < BLOCK else settle(KVCache(*map(without_unused, state)))


def cache_dtype(cache: Tensor, new: Tensor) -> torch.dtype:
    """Return the narrower dtype, in which new keys or values are cached: that of the cache or their own."""
    return cache.dtype if cache.dtype.itemsize < new.dtype.itemsize else new.dtype


def concat(first: KeyValues, second: KeyValues) -> KeyValues:
    """Concatenate the keys and values of two runs of tokens, in the dtype of a cache of the first."""
    dtype = cache_dtype(first.k, second.k)
    first, second = first.to(dtype), second.to(dtype)
    if first.k.shape[2] == 0:
        return second
    pairs = zip(first, second, (2, 2, 1), strict=True)
    return KeyValues(*(torch.cat([past, new], dim=dim) for past, new, dim in pairs))


def settle(state: KVCache) -> KVCache:
    """Append the recent tokens to the settled ones, in whole blocks."""
    settled, recent = state
    whole = recent.k.shape[2] // BLOCK * BLOCK
    if not whole:
        return state
    return KVCache(concat(settled, tokens_between(recent, 0, whole)), tokens_between(recent, whole, recent.k.shape[2]))


def tokens_between(cache: KeyValues, begin: int, end: int) -> KeyValues:
    """Return the tokens from `begin` to `end`, cloned: a view would keep all tokens alive."""
    k, v, current = cache
    return KeyValues(k[:, :, begin:end].clone(), v[:, :, begin:end].clone(), current[:, begin:end].clone())


def without_unused(cache: KeyValues) -> KeyValues:
    """Drop tokens that no row attends to any more, if rows began at different times or skipped tokens."""
    unused = cache.k.shape[2] - int(cache.current.sum(1).max())
    if not unused:
        return cache
    order = cache.current.int().argsort(dim=1, stable=True)[:, unused:]  # tokens that a row attends to are last
    index = order[:, None, :, None].expand(-1, cache.k.shape[1], -1, -1)
    k, v = (x.gather(2, index.expand(-1, -1, -1, x.shape[3])) for x in (cache.k, cache.v))
    return KeyValues(k, v, cache.current.gather(1, order))
