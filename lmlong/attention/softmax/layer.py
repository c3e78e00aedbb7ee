"""Exact softmax attention: the baseline, whose state grows by a key and a value with each token.

B batch, H query heads, G key/value heads, each shared by H / G neighbouring query heads, T new tokens, P past tokens,
K key dim, V value dim.
"""

import ctypes
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from lmlong.attention.base import CausalAttention, causal_mask
from lmlong.attention.block_sparse import attend, attends
from lmlong.attention.device_policy import DevicePolicy
from lmlong.attention.inputs import NOTHING, Inputs
from lmlong.attention.key_blocks import visible_keys
from lmlong.attention.softmax.state import (
    BLOCK,
    KeyValues,
    KVCache,
    SoftmaxEffect,
    concat,
    settle,
    tokens_between,
    with_room,
    without_unused,
)
from lmlong.native.decode.kind import DecodeKind, Packer, native
from lmlong.native.decode.packer import DTYPES
from lmlong.native.decode.structures import ints, pointers, structure
from lmlong.recipe.kinds import ATTENTION_KINDS

KEY_VALUES = (*pointers(*KeyValues._fields), *ints("dtype"))
"""The fields of the C++ KeyValues: tensors of past tokens, and the dtype of keys and values."""


def key_value_fields(k: Tensor, v: Tensor, current: Tensor) -> list[int]:
    return [k.data_ptr(), v.data_ptr(), current.data_ptr(), DTYPES[k.dtype]]


def cached(*tensors: Tensor) -> list[Tensor]:
    """Return keys and values in one dtype that native code reads: bfloat16 if all are, else float32."""
    if all(x.dtype is torch.bfloat16 for x in tensors):
        return [x.contiguous() for x in tensors]
    return list(map(native, tensors))


class SoftmaxDecode(DecodeKind[KVCache]):
    name = "SoftmaxAttention"
    header = Path(__file__).with_name("decode.h")
    weights = structure("SoftmaxAttention::Weights")
    state = structure(
        "SoftmaxAttention::State",
        *((name, structure("KeyValues", *KEY_VALUES)) for name in KVCache._fields),
        *ints("settled_size", "recent_size"),
    )
    takes_groups = True
    grows = True
    constants = MappingProxyType({"CACHE_BLOCK": BLOCK})

    def pack(self, packer: Packer, attention: Any, gates: Mapping[str, nn.Module]) -> ctypes.Structure:
        packer.known(attention, SoftmaxAttention)
        return self.weights()

    def fields(self, state: KVCache) -> list[int]:
        sizes = (part.k.shape[2] for part in state)
        return [*key_value_fields(*state.settled), *key_value_fields(*state.recent), *sizes]

    def as_native(self, state: KVCache) -> KVCache:
        (k, v, current), (recent_k, recent_v, recent_current) = state
        k, v, recent_k, recent_v = cached(k, v, recent_k, recent_v)
        return KVCache(KeyValues(k, v, native(current)), KeyValues(recent_k, recent_v, native(recent_current)))

    def each_written(self, change: Callable[[Tensor], Tensor], state: KVCache) -> KVCache:
        return KVCache(*(KeyValues(*map(change, part)) for part in state))

    def empty_after(self, state: KVCache) -> KVCache:
        """Return the state with room for one more recent token. A token that starts a document, as only the blocks of
        downsampled layers do, lets the state attend to no settled token."""
        settled, (k, v, current) = state
        settled = settled._replace(current=settled.current.clone())
        batch, kv_heads, time, head_dim = k.shape
        new_k = k.new_empty(batch, kv_heads, time + 1, head_dim)
        new_v = v.new_empty(batch, kv_heads, time + 1, v.shape[3])
        return KVCache(settled, KeyValues(new_k, new_v, current.new_empty(batch, time + 1)))

    def with_room(self, state: KVCache, full: bool) -> KVCache:
        return with_room(state)


class SoftmaxAttention(CausalAttention[KVCache]):
    """y_t = softmax(q_t K^T / sqrt(width)) V over the tokens of the document so far."""

    largest_scale = 10.0  # torch's backward pass overflows where one key far outweighs all others
    uses_rope = ATTENTION_KINDS["softmax"].uses_rope
    shares_keys = True
    state_growth = ATTENTION_KINDS["softmax"].state_growth
    native_decode = SoftmaxDecode()

    def __init__(self, heads: int, head_dim: int, value_dim: int):
        super().__init__()
        self.heads, self.head_dim, self.value_dim = heads, head_dim, value_dim

    def init_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> KVCache:
        k, v = (
            torch.zeros(batch, self.kv_heads, 0, size, device=device, dtype=self.cache_dtype or dtype)
            for size in (self.head_dim, self.value_dim)
        )
        nothing = KeyValues(k, v, torch.zeros(batch, 0, device=device, dtype=torch.bool))
        return KVCache(nothing, nothing)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: KVCache,
        document_starts: Tensor | None = None,
        inputs: Inputs = NOTHING,
    ) -> tuple[Tensor, KVCache]:
        if k.shape[2] == 0:
            return v.new_zeros(*q.shape[:3], self.value_dim), state
        if k.shape[2] == 1 and document_starts is None:
            return self._decode(q, k, v, state)
        policy, past = self.policy_for(q), concat(state.settled, state.recent)
        effect = self.effect(k, v, document_starts)
        after = self.after_effect(state, effect)
        seen = concat(past, effect.tokens).to(q.dtype)  # as they are cached
        if past.k.shape[2] == 0 and document_starts is None:
            return self._causal(q, seen.k, seen.v, policy), after
        visible = visible_keys(past.current, document_starts, k.shape[2])
        if attends(policy, q):
            y = attend(q, seen.k, seen.v, visible)
        else:
            mask = visible.mask()[:, None]
            y = scaled_dot_product_attention(q, seen.k, seen.v, attn_mask=mask, enable_gqa=self.queries_per_key > 1)
        return y, after

    def _causal(self, q: Tensor, k: Tensor, v: Tensor, policy: DevicePolicy) -> Tensor:
        """Return the outputs if all tokens belong to one document and none came before."""
        half = q.dtype in (torch.float16, torch.bfloat16)
        if not policy.reads_values and not (half and self.head_dim == self.value_dim <= 256):
            # of a GPU's kernels, only flash attention takes grouped heads; others would have a matrix of all pairs
            k, v = self.ungrouped(k, v)
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])

    def _decode(self, q: Tensor, k: Tensor, v: Tensor, state: KVCache) -> tuple[Tensor, KVCache]:
        """Return the output of one token and the state after it; the settled tokens are not copied."""
        after = KVCache(state.settled, concat(state.recent, KeyValues(k, v, _ones(k))))
        settled, recent = (part.to(q.dtype) for part in after)
        q = q.unflatten(1, (self.kv_heads, -1)).flatten(2, 3)  # (B, G, H / G, K)
        logits = torch.cat([q @ settled.k.mT, q @ recent.k.mT], dim=-1) * self.head_dim**-0.5
        current = torch.cat([settled.current, recent.current], dim=1)
        weights = logits.masked_fill(~current[:, None, None], -torch.inf).softmax(-1)
        first, second = weights.split([settled.k.shape[2], recent.k.shape[2]], dim=-1)
        y = first @ settled.v + second @ recent.v
        return y.flatten(1, 2)[:, :, None], with_room(after)

    def reference(
        self, q: Tensor, k: Tensor, v: Tensor, document_starts: Tensor | None = None, inputs: Inputs = NOTHING
    ) -> Tensor:
        k, v = self.ungrouped(k, v)
        return softmax_reference(q, k, v, causal_mask(q.shape[2], q.device, document_starts))

    def effect(
        self, k: Tensor, v: Tensor, document_starts: Tensor | None = None, inputs: Inputs = NOTHING
    ) -> SoftmaxEffect:
        current, begun = last_document(k, document_starts)
        return SoftmaxEffect(KeyValues(k, v, current), begun)

    def after_effect(self, state: KVCache, effect: SoftmaxEffect) -> KVCache:
        continues = ~effect.begun[:, None]
        settled, recent = (part._replace(current=part.current & continues) for part in state)
        return settle(KVCache(settled, concat(recent, effect.tokens)))

    def padded_effect(self, effect: SoftmaxEffect, tokens: int) -> SoftmaxEffect:
        k, v, current = effect.tokens
        more = tokens - k.shape[2]
        padded = KeyValues(pad(k, (0, 0, 0, more)), pad(v, (0, 0, 0, more)), pad(current, (0, more)))
        return effect._replace(tokens=padded)

    def state_numbers(self, tokens: int) -> int:
        return tokens * (self.kv_heads * (self.head_dim + self.value_dim) + 1)

    def settle(self, state: KVCache) -> KVCache:
        """Drop tokens that are no longer attended to, as decode steps do."""
        k, v, current = without_unused(concat(*state))
        unused = ~current[:, None, :, None]
        whole = KeyValues(k.masked_fill(unused, 0), v.masked_fill(unused, 0), current)
        return settle(KVCache(tokens_between(whole, 0, 0), whole))


def _ones(k: Tensor) -> Tensor:
    """Return a mask (B, T) that is true everywhere."""
    return torch.ones(len(k), k.shape[2], dtype=torch.bool, device=k.device)


def last_document(k: Tensor, document_starts: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return which tokens (B, T) are of the last document, and whether it starts in them (B,)."""
    if document_starts is None:
        return _ones(k), k.new_zeros(len(k), dtype=torch.bool)
    document = document_starts.cumsum(1)
    return document == document[:, -1:], document_starts.any(1)


def softmax_reference(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Return softmax(q K^T / sqrt(width)) V over the tokens where `mask` (..., T, T) is true."""
    logits = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~mask, -torch.inf)
    return logits.softmax(-1) @ v
