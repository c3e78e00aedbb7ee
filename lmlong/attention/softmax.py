"""Exact softmax attention: the baseline, whose state grows by a key and a value with each token.

B batch, H heads, T new tokens, P past tokens.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lmlong.attention.contract import CausalAttention


class KeyValueState(NamedTuple):
    k: Tensor  # (B, H, P, width)
    v: Tensor  # (B, H, P, width)
    current: Tensor  # (B, P) bool: of the document the row is in


class SoftmaxAttention(CausalAttention[KeyValueState]):
    """y_t = softmax(q_t K^T / sqrt(width)) V over the tokens of the document so far."""

    largest_scale = 10.0  # torch's backward pass overflows where one key outweighs all others by far
    turned_by_position = True

    def __init__(self, heads: int, width: int):
        super().__init__()
        self.heads, self.width = heads, width

    def init_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> KeyValueState:
        empty = torch.zeros(batch, self.heads, 0, self.width, device=device, dtype=dtype)
        return KeyValueState(empty, empty, torch.zeros(batch, 0, device=device, dtype=torch.bool))

    def prefill(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: KeyValueState,
        starts: Tensor | None = None,
        log_decay: Tensor | None = None,
    ) -> tuple[Tensor, KeyValueState]:
        past, time = state.k.shape[2], k.shape[2]
        keys = torch.cat([state.k.to(k.dtype), k], dim=2)
        values = torch.cat([state.v.to(v.dtype), v], dim=2)
        if past == 0 and starts is None:
            current = torch.ones(len(k), time, dtype=torch.bool, device=k.device)
            return scaled_dot_product_attention(q, keys, values, is_causal=True), KeyValueState(keys, values, current)

        if starts is None:
            starts = torch.zeros(len(k), time, dtype=torch.bool, device=k.device)
        document = starts.cumsum(1)  # 0 is the document that came in
        mask = torch.cat(
            [
                state.current[:, None, :] & (document == 0)[:, :, None],
                (document[:, :, None] == document[:, None, :]) & mask_of_the_past(time, k.device),
            ],
            dim=2,
        )
        current = torch.cat(
            [state.current & (document[:, -1:] == 0), document == document[:, -1:]],
            dim=1,
        )
        y = scaled_dot_product_attention(q, keys, values, attn_mask=mask[:, None])
        return y, KeyValueState(keys, values, current)

    def reference(
        self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None = None, log_decay: Tensor | None = None
    ) -> Tensor:
        return masked_softmax(q, k, v, mask_of_the_past(q.shape[2], q.device), starts)

    def state_numbers(self, tokens: int) -> int:
        return tokens * (2 * self.heads * self.width + 1)


def masked_softmax(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, starts: Tensor | None) -> Tensor:
    """The definition: softmax(q K^T / sqrt(width)) V over what the mask (time, time) shows of the same document."""
    if starts is not None:
        document = starts.cumsum(1)
        mask = mask & (document[:, None, :, None] == document[:, None, None, :])
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ v


def mask_of_the_past(time: int, device: torch.device) -> Tensor:
    """(time, time), true where the second index is not after the first."""
    return torch.ones(time, time, dtype=torch.bool, device=device).tril()
