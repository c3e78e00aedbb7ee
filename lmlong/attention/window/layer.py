"""Exact softmax attention over the last W tokens: a constant state, and the companion of linear attention.

B batch, H heads, T new tokens, W window, N blocks, C tokens in a block, K key dim, V value dim.
"""

import ctypes
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from lmlong import recipe
from lmlong.attention.base import CausalAttention, causal_mask
from lmlong.attention.block_sparse import attend
from lmlong.attention.inputs import NOTHING, Inputs
from lmlong.attention.key_blocks import visible_keys
from lmlong.attention.softmax.layer import last_document, softmax_graph, softmax_reference
from lmlong.attention.tail import Tail, after_tail, tail_of
from lmlong.native.decode.kind import DecodeKind, Packer
from lmlong.native.decode.structures import ints, pointers, structure
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
    state = structure("WindowAttention::State", *pointers(*WindowState._fields))

    def pack(self, packer: Packer, attention: Any, gates: Mapping[str, nn.Module]) -> ctypes.Structure:
        return self.weights(packer.open(attention, "window").options["window"])


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
            torch.zeros(batch, self.heads, self.window - 1, size, device=device, dtype=dtype)
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
        keys, values = torch.cat([state.k.to(k.dtype), k], dim=2), torch.cat([state.v.to(v.dtype), v], dim=2)
        document = _documents(state.current, document_starts, time)  # (B, W - 1 + T)
        if self.policy_for(q).block_sparse and time > 1:
            y = attend(q, keys, values, visible_keys(state.current, document_starts, time, self.window))
        else:
            y = self._attend(q, keys, values, document)
        current = document[:, time:] == document[:, -1:]
        # cloned: a view would keep all keys and values alive
        return y, WindowState(keys[:, :, time:].clone(), values[:, :, time:].clone(), current)

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, document: Tensor) -> Tensor:
        """Return the outputs. Each block of up to W queries attends to its own keys and the W - 1 before it."""
        time, past = q.shape[2], self.window - 1
        block = min(self.window, time)
        missing = -time % block
        q_blocks = pad(q, (0, 0, 0, missing)).unflatten(2, (-1, block))  # (B, H, N, C, K)
        k_blocks, v_blocks = (pad(x, (0, 0, 0, missing)).unfold(2, past + block, block).mT for x in (keys, values))
        mask = self._mask(pad(document, (0, missing)), block)
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
        return WindowState(
            after_tail(state.k, effect.k, dim=2),
            after_tail(state.v, effect.v, dim=2),
            after_tail(current, effect.current),
        )

    def native_spec(self) -> NativeSpec:
        return NativeSpec("window", {"window": self.window})

    def onnx(self, reader: GraphReader, x: LayerInputs) -> Value:
        return softmax_graph(x, reader.open(self).options["window"])

    def _mask(self, document: Tensor, block: int) -> Tensor:
        """Return (B N, C, W - 1 + C), true if a query sees a key: within the window and in the same document."""
        past = self.window - 1
        position = torch.arange(past + block, device=document.device)
        distance = position[past:, None] - position
        in_window = (distance >= 0) & (distance <= past)
        keys = document.unfold(1, past + block, block)  # (B, N, W - 1 + C)
        same_document = keys[..., past:, None] == keys[..., None, :]
        return (in_window & same_document).flatten(0, 1)


def _documents(current: Tensor, document_starts: Tensor | None, time: int) -> Tensor:
    """Return the document of each past and new token: 0 for the document of the state, -1 for older or no tokens."""
    past = current.long() - 1
    if document_starts is None:
        return torch.cat([past, past.new_zeros(len(past), time)], dim=1)
    return torch.cat([past, document_starts.cumsum(1)], dim=1)
