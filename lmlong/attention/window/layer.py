"""Exact softmax attention over the last W tokens: a constant state, and the companion of linear attention.

B batch, H heads, T new tokens, W window, N blocks, C tokens in a block, K key dim, V value dim.
"""

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from lmlong import recipe
from lmlong.attention.base import CausalAttention, causal_mask
from lmlong.attention.block_sparse import attend
from lmlong.attention.inputs import NOTHING, Inputs
from lmlong.attention.key_blocks import VisibleKeys, visible_keys
from lmlong.attention.softmax.decode import KEY_VALUES, cached, key_value_fields
from lmlong.attention.softmax.layer import last_document, softmax_graph, softmax_reference
from lmlong.attention.softmax.state import cache_dtype
from lmlong.attention.tail import Tail, after_tail, tail_of
from lmlong.native.decode.kind import DecodeKind, Packer, native
from lmlong.native.decode.structures import ints, structure
from lmlong.native.onnx.graph import Value
from lmlong.native.onnx.layer import GraphReader, LayerInputs
from lmlong.native.spec import NativeSpec
from lmlong.recipe.kinds import ATTENTION_KINDS


class WindowState(NamedTuple):
    k: Tensor  # (B, H, W - 1, K) the last keys
    v: Tensor  # (B, H, W - 1, V) and values
    current: Tensor  # (B, W - 1) bool, true for tokens of the row's current document


class WindowEffect(NamedTuple):
    """The last W - 1 tokens of a part, and whether a document starts in it."""

    k: Tail  # (B, H, W - 1, K)
    v: Tail  # (B, H, W - 1, V)
    current: Tail  # (B, W - 1) bool, true for tokens of the part's last document
    begun: Tensor  # (B,) bool


class WindowDecode(DecodeKind[WindowState]):
    name = "WindowAttention"
    header = Path(__file__).with_name("decode.h")
    weights = structure("WindowAttention::Weights", *ints("window"))
    state = structure("WindowAttention::State", *KEY_VALUES)

    def pack(self, packer: Packer, attention: Any, gates: Mapping[str, nn.Module]) -> ctypes.Structure:
        return self.weights(packer.open(attention, "window").options["window"])

    def fields(self, state: WindowState) -> Sequence[int]:
        return key_value_fields(*state)

    def as_native(self, state: WindowState) -> WindowState:
        k, v = cached(state.k, state.v)
        return WindowState(k, v, native(state.current))


class WindowAttention(CausalAttention[WindowState]):
    """y_t = softmax(q_t K^T / sqrt(width)) V over the last W tokens of the document, including token t."""

    largest_scale = 10.0  # torch's backward pass overflows where one key far outweighs all others
    uses_rope = ATTENTION_KINDS["window"].uses_rope
    native_decode = WindowDecode()

    def __init__(self, heads: int, head_dim: int, value_dim: int, window: int):
        super().__init__()
        self.heads, self.head_dim, self.value_dim, self.window = heads, head_dim, value_dim, window

    @classmethod
    def from_options(cls, heads: int, head_dim: int, value_dim: int, options: recipe.Attention) -> "WindowAttention":
        return cls(heads, head_dim, value_dim, options.window)

    def init_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> WindowState:
        k, v = (
            torch.zeros(batch, self.heads, self.window - 1, size, device=device, dtype=self.cache_dtype or dtype)
            for size in (self.head_dim, self.value_dim)
        )
        return WindowState(k, v, torch.zeros(batch, self.window - 1, device=device, dtype=torch.bool))

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: WindowState,
        document_starts: Tensor | None = None,
        inputs: Inputs = NOTHING,
    ) -> tuple[Tensor, WindowState]:
        time = k.shape[2]
        if not time or not len(v):
            return v, state
        cached_keys, cached_values = _appended(state.k, k), _appended(state.v, v)
        keys, values = cached_keys.to(k.dtype), cached_values.to(v.dtype)
        visible = visible_keys(state.current, document_starts, time, self.window)
        by_lists = self.policy_for(q).block_sparse and time > 1
        y = attend(q, keys, values, visible) if by_lists else self._attend(q, keys, values, visible)
        # cloned: a view would keep all keys and values alive
        k, v = (x[:, :, time:].clone() for x in (cached_keys, cached_values))
        return y, WindowState(k, v, visible.of_last_query(time))

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, visible: VisibleKeys) -> Tensor:
        """Return the outputs. Each block of up to W queries attends to its own keys and the W - 1 before it."""
        time, past = q.shape[2], self.window - 1
        block = min(self.window, time)
        missing = -time % block
        q_blocks = pad(q, (0, 0, 0, missing)).unflatten(2, (-1, block))  # (B, H, N, C, K)
        k_blocks, v_blocks = (pad(x, (0, 0, 0, missing)).unfold(2, past + block, block).mT for x in (keys, values))
        mask = self._mask(visible, block, missing)
        rows = (x.transpose(1, 2).flatten(0, 1) for x in (q_blocks, k_blocks, v_blocks))  # each (B N, H, ...)
        y = scaled_dot_product_attention(next(rows), next(rows), next(rows), mask[:, None])
        return y.unflatten(0, (len(q), -1)).transpose(1, 2).flatten(2, 3)[:, :, :time]

    def reference(
        self, q: Tensor, k: Tensor, v: Tensor, document_starts: Tensor | None = None, inputs: Inputs = NOTHING
    ) -> Tensor:
        return softmax_reference(q, k, v, causal_mask(q.shape[2], q.device, document_starts).triu(1 - self.window))

    def effect(
        self, k: Tensor, v: Tensor, document_starts: Tensor | None = None, inputs: Inputs = NOTHING
    ) -> WindowEffect:
        past, (current, begun) = self.window - 1, last_document(k, document_starts)
        return WindowEffect(tail_of(k, past, dim=2), tail_of(v, past, dim=2), tail_of(current, past), begun)

    def after_effect(self, state: WindowState, effect: WindowEffect) -> WindowState:
        current = state.current & ~effect.begun[:, None]
        k, v = (
            after_tail(past, new, dim=2).to(cache_dtype(past, new.tokens))
            for past, new in ((state.k, effect.k), (state.v, effect.v))
        )
        return WindowState(k, v, after_tail(current, effect.current))

    def native_spec(self) -> NativeSpec:
        return NativeSpec("window", {"window": self.window})

    def onnx(self, reader: GraphReader, x: LayerInputs) -> Value:
        return softmax_graph(x, reader.open(self).options["window"])

    def _mask(self, visible: VisibleKeys, block: int, missing: int) -> Tensor:
        """Return (B N, C, W - 1 + C), true if a query sees a key. Padding sees only padding."""
        past, keys = self.window - 1, visible.in_use.shape[1]
        key = torch.arange(keys + missing, device=visible.first.device).unfold(0, past + block, block)[:, None]
        first = pad(visible.first, (0, missing), value=keys).unflatten(1, (-1, block))[..., None]  # (B, N, C, 1)
        in_use = pad(visible.in_use, (0, missing), value=True).unfold(1, past + block, block)[:, :, None]
        return ((first <= key) & (key <= key[..., past:].mT) & in_use).flatten(0, 1)


def _appended(past: Tensor, new: Tensor) -> Tensor:
    """Return the keys or values of past tokens and new ones, as they are cached."""
    dtype = cache_dtype(past, new)
    return torch.cat([past.to(dtype), new.to(dtype)], dim=2)
