"""Exact softmax attention over the last W tokens: a constant state, and the companion of linear attention.

With a sink, each head also attends to a learned value, with a logit learned from the token, as softmax models attend to
their first token.

B batch, H query heads, G key/value heads, each shared by H / G neighbouring query heads, T new tokens, W window, N
blocks, C tokens in a block, K key dim, V value dim.
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
from lmlong.attention.block_sparse import attend, attends
from lmlong.attention.inputs import NOTHING, Gate, Inputs
from lmlong.attention.key_blocks import VisibleKeys, visible_keys
from lmlong.attention.native_weights import pack_gate
from lmlong.attention.softmax.layer import KEY_VALUES, cached, key_value_fields, last_document, softmax_reference
from lmlong.attention.softmax.state import cache_dtype
from lmlong.attention.tail import Tail, after_tail, tail_of
from lmlong.native.decode.kind import DecodeKind, Packer, native
from lmlong.native.decode.structures import Gate as GateWeights
from lmlong.native.decode.structures import ints, pointers, structure
from lmlong.recipe.kinds import ATTENTION_KINDS

SINK = "window_sink"
"""The name of the logits of the sinks among the inputs."""

SINK_CHANNELS = 8
"""Channels added to queries and keys for the logit of the sink: one, and zeros for kernels that read eight at once."""

BLOCK = 256
"""Most queries that are computed with the same keys: more would have more keys that are in none of their windows."""


class WindowState(NamedTuple):
    k: Tensor  # (B, G, W - 1, K) the last keys
    v: Tensor  # (B, G, W - 1, V) and values
    current: Tensor  # (B, W - 1) bool, true for tokens of the row's current document


class WindowEffect(NamedTuple):
    """The last W - 1 tokens of a part, and whether a document starts in it."""

    k: Tail  # (B, G, W - 1, K)
    v: Tail  # (B, G, W - 1, V)
    current: Tail  # (B, W - 1) bool, true for tokens of the part's last document
    begun: Tensor  # (B,) bool


WEIGHTS = (*ints("window"), ("sink", GateWeights), *pointers("sink_value"))
"""The fields of the C++ weights. Those of the sink are null in a window that has none."""


class WindowDecode(DecodeKind[WindowState]):
    name = "WindowAttention"
    header = Path(__file__).with_name("decode.h")
    weights = structure("WindowAttention::Weights", *WEIGHTS)
    state = structure("WindowAttention::State", *KEY_VALUES)
    takes_groups = True

    def pack(self, packer: Packer, attention: Any, gates: Mapping[str, nn.Module]) -> ctypes.Structure:
        packer.known(attention, WindowAttention)
        packed = self.weights(attention.window)
        if attention.sink_value is not None:
            packed.sink = pack_gate(packer, gates[SINK], "identity", attention.heads)
            packed.sink_value = packer.floats(attention, attention.sink_value)
        return packed

    def fields(self, state: WindowState) -> Sequence[int]:
        return key_value_fields(*state)

    def as_native(self, state: WindowState) -> WindowState:
        k, v = cached(state.k, state.v)
        return WindowState(k, v, native(state.current))


class WindowAttention(CausalAttention[WindowState]):
    """y_t = softmax(q_t K^T / sqrt(width)) V over the last W tokens of the document up to t, and the sink."""

    largest_scale = 10.0  # torch's backward pass overflows where one key far outweighs all others
    uses_rope = ATTENTION_KINDS["window"].uses_rope
    shares_keys = True
    native_decode = WindowDecode()

    def __init__(self, heads: int, head_dim: int, value_dim: int, window: int, sink: bool = False):
        super().__init__()
        self.heads, self.head_dim, self.value_dim, self.window = heads, head_dim, value_dim, window
        self.inputs = {SINK: Gate(SINK, "identity", torch.zeros(heads))} if sink else {}
        self.sink_value = nn.Parameter(torch.zeros(heads, value_dim)) if sink else None
        """(G, V) the value of the sink."""

    @classmethod
    def from_options(cls, heads: int, head_dim: int, value_dim: int, options: recipe.Attention) -> "WindowAttention":
        return cls(heads, head_dim, value_dim, options.window, options.window_sink)

    def group_heads(self, kv_heads: int) -> bool:
        if self.sink_value is not None:
            self.sink_value = nn.Parameter(torch.zeros(kv_heads, self.value_dim))
        return super().group_heads(kv_heads)

    def init_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> WindowState:
        k, v = (
            torch.zeros(batch, self.kv_heads, self.window - 1, size, device=device, dtype=self.cache_dtype or dtype)
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
            return v.new_zeros(*q.shape[:3], self.value_dim), state
        cached_keys, cached_values = _appended(state.k, k), _appended(state.v, v)
        keys, values = cached_keys.to(k.dtype), cached_values.to(v.dtype)
        visible = visible_keys(state.current, document_starts, time, self.window)
        by_lists = self.sink_value is None and attends(self.policy_for(q), q)
        y = attend(q, keys, values, visible) if by_lists else self._attend(q, keys, values, visible, inputs.get(SINK))
        # cloned: a view would keep all keys and values alive
        k, v = (x[:, :, time:].clone() for x in (cached_keys, cached_values))
        return y, WindowState(k, v, visible.of_last_query(time))

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, visible: VisibleKeys, sink: Tensor | None) -> Tensor:
        """Return the outputs. Each block of queries attends to its own keys and the W - 1 before it, and to the sink by
        its logits (B, H, T)."""
        time, past, scale = q.shape[2], self.window - 1, self.head_dim**-0.5
        block = min(self.window, time, BLOCK)
        missing = -time % block
        shared = [keys, values, *([] if self.sink_value is None else [self.sink_value[None]])]
        # with a mask, a GPU's kernels take no heads that share keys
        keys, values, *sinks = shared if self.policy_for(q).reads_values else self.ungrouped(*shared)
        if sink is not None:
            q = torch.cat([q, pad(sink.to(q.dtype)[..., None] / scale, (0, SINK_CHANNELS - 1))], dim=3)
        q_blocks = pad(q, (0, 0, 0, missing)).unflatten(2, (-1, block))  # (B, H, N, C, K)
        k_blocks, v_blocks = (pad(x, (0, 0, 0, missing)).unfold(2, past + block, block).mT for x in (keys, values))
        mask = self._mask(visible, block, missing)
        if sinks:
            k_blocks, v_blocks = _with_sink(k_blocks, v_blocks, sinks[0])
            mask = pad(mask, (0, 1), value=True)
        rows = (x.transpose(1, 2).flatten(0, 1) for x in (q_blocks, k_blocks, v_blocks))  # each (B N, H or G, ...)
        options: Any = {"attn_mask": mask[:, None], "scale": scale, "enable_gqa": keys.shape[1] != q.shape[1]}
        y = scaled_dot_product_attention(next(rows), next(rows), next(rows), **options)
        return y.unflatten(0, (len(q), -1)).transpose(1, 2).flatten(2, 3)[:, :, :time, : self.value_dim]

    def reference(
        self, q: Tensor, k: Tensor, v: Tensor, document_starts: Tensor | None = None, inputs: Inputs = NOTHING
    ) -> Tensor:
        mask = causal_mask(q.shape[2], q.device, document_starts).triu(1 - self.window)
        k, v = self.ungrouped(k, v)
        if self.sink_value is None:
            return softmax_reference(q, k, v, mask)
        logits = (q @ k.mT / self.head_dim**0.5).masked_fill(~mask, -torch.inf)
        weights = torch.cat([logits, inputs[SINK].to(q.dtype)[..., None]], dim=3).softmax(3)
        (value,) = self.ungrouped(self.sink_value[None].to(v.dtype))
        return weights[..., :-1] @ v + weights[..., -1:] * value[..., None, :]

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


def _with_sink(keys: Tensor, values: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Return blocks of keys (B, G, N, S, K) and values (B, G, N, S, V), each followed by the sink, of value (1, G, V).
    Its key picks the first added channel of a query, which holds its logit; those of tokens have zeros there. Values
    are made as wide as keys, since torch's fast kernel has one width."""
    key = pad(keys.new_ones(1), (keys.shape[-1], SINK_CHANNELS - 1)).expand(*keys.shape[:3], 1, -1)
    value = sink.to(values.dtype)[:, :, None, None].expand(*values.shape[:3], 1, -1)
    keys, values = torch.cat([pad(keys, (0, SINK_CHANNELS)), key], dim=3), torch.cat([values, value], dim=3)
    return keys, pad(values, (0, max(0, keys.shape[-1] - values.shape[-1])))
