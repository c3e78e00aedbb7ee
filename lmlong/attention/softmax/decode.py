"""Softmax attention in the native decode step."""

import ctypes
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import pad

from lmlong.attention.softmax.state import KeyValues, KVCache, with_room
from lmlong.native.decode.kind import DecodeKind, Packer, native
from lmlong.native.decode.structures import ints, pointers, structure

KEY_VALUES = structure("KeyValues", *pointers(*KeyValues._fields))


class SoftmaxDecode(DecodeKind[KVCache]):
    name = "SoftmaxAttention"
    header = Path(__file__).with_suffix(".h")
    weights = structure("SoftmaxAttention::Weights")
    state = structure(
        "SoftmaxAttention::State",
        *((name, KEY_VALUES) for name in KVCache._fields),
        *ints("settled_size", "recent_size"),
    )
    grows = True

    def pack(self, packer: Packer, attention: Any, gates: Mapping[str, nn.Module]) -> ctypes.Structure:
        packer.open(attention, "softmax_attention")
        return self.weights()

    def fields(self, state: KVCache) -> list[int]:
        addresses = [x.data_ptr() for part in state for x in part]
        return [*addresses, state.settled.k.shape[2], state.recent.k.shape[2]]

    def as_native(self, state: KVCache) -> KVCache:
        return self.each_written(native, state)

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
