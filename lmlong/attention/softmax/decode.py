"""Softmax attention in the native decode step."""

import ctypes
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from lmlong.attention.softmax.state import KeyValues, KVCache, with_room
from lmlong.native.decode.kind import DecodeKind, Packer, native
from lmlong.native.decode.packer import DTYPES
from lmlong.native.decode.structures import ints, pointers, structure

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
    header = Path(__file__).with_suffix(".h")
    weights = structure("SoftmaxAttention::Weights")
    state = structure(
        "SoftmaxAttention::State",
        *((name, structure("KeyValues", *KEY_VALUES)) for name in KVCache._fields),
        *ints("settled_size", "recent_size"),
    )
    takes_groups = True
    grows = True

    def pack(self, packer: Packer, attention: Any, gates: Mapping[str, nn.Module]) -> ctypes.Structure:
        packer.open(attention, "softmax_attention")
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

    def empty_after(self, state: KVCache, by_row: bool) -> KVCache:
        """Return the state with room for one more recent token. A row that does not read the token keeps its tokens
        last; a row that begins a document attends to no settled token."""
        settled, (k, v, current) = state
        if by_row:
            recent = KeyValues(pad(k, (0, 0, 1, 0)), pad(v, (0, 0, 1, 0)), pad(current, (1, 0)))
            return KVCache(settled._replace(current=settled.current.clone()), recent)
        batch, kv_heads, time, head_dim = k.shape
        new_k = k.new_empty(batch, kv_heads, time + 1, head_dim)
        new_v = v.new_empty(batch, kv_heads, time + 1, v.shape[3])
        return KVCache(settled, KeyValues(new_k, new_v, current.new_empty(batch, time + 1)))

    def with_room(self, state: KVCache, full: bool) -> KVCache:
        return with_room(state)
