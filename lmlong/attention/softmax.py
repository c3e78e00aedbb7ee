"""Exact softmax attention: the baseline, whose state grows by a key and a value with each token.

B batch, H heads, T new tokens, P past tokens.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lmlong.attention.contract import CausalAttention

BLOCK = 1024
"""Past tokens that are gathered before they join the others: to copy all of them for each new one would cost more than
to look at them."""


class Past(NamedTuple):
    """Tokens seen before."""

    k: Tensor  # (B, H, P, width)
    v: Tensor  # (B, H, P, width)
    current: Tensor  # (B, P) bool: of the document the row is in


class KeyValueState(NamedTuple):
    settled: Past
    recent: Past  # at most BLOCK


class SoftmaxAttention(CausalAttention[KeyValueState]):
    """y_t = softmax(q_t K^T / sqrt(width)) V over the tokens of the document so far."""

    largest_scale = 10.0  # torch's backward pass overflows where one key outweighs all others by far
    turned_by_position = True

    def __init__(self, heads: int, width: int):
        super().__init__()
        self.heads, self.width = heads, width

    def init_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> KeyValueState:
        empty = torch.zeros(batch, self.heads, 0, self.width, device=device, dtype=dtype)
        nothing = Past(empty, empty, torch.zeros(batch, 0, device=device, dtype=torch.bool))
        return KeyValueState(nothing, nothing)

    def prefill(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: KeyValueState,
        starts: Tensor | None = None,
        log_decay: Tensor | None = None,
    ) -> tuple[Tensor, KeyValueState]:
        if k.shape[2] == 1 and starts is None:
            return self._one(q, k, v, state)
        past = _after(state.settled, state.recent)
        if past.k.shape[2] == 0 and starts is None:
            y = scaled_dot_product_attention(q, k, v, is_causal=True)
            return y, _gathered(state, Past(k, v, _all_of(k)))

        starts = ~_all_of(k) if starts is None else starts
        document = starts.cumsum(1)  # 0 is the document that came in
        mask = torch.cat(
            [
                past.current[:, None, :] & (document == 0)[:, :, None],
                (document[:, :, None] == document[:, None, :]) & mask_of_the_past(k.shape[2], k.device),
            ],
            dim=2,
        )
        seen = _after(past, Past(k, v, document == document[:, -1:]))
        y = scaled_dot_product_attention(q, seen.k, seen.v, attn_mask=mask[:, None])
        goes_on = document[:, -1:] == 0
        kept = KeyValueState(*(part._replace(current=part.current & goes_on) for part in state))
        return y, _gathered(kept, Past(k, v, document == document[:, -1:]))

    def _one(self, q: Tensor, k: Tensor, v: Tensor, state: KeyValueState) -> tuple[Tensor, KeyValueState]:
        """One token, which looks at what is settled where it lies."""
        settled, recent = state if state.recent.k.shape[2] < BLOCK else _settle(KeyValueState(*map(_needed, state)))
        recent = _after(recent, Past(k, v, _all_of(k)))
        scores = torch.cat([q @ settled.k.to(q.dtype).mT, q @ recent.k.mT], dim=-1) * self.width**-0.5
        current = torch.cat([settled.current, recent.current], dim=1)
        weights = scores.masked_fill(~current[:, None, None], -torch.inf).softmax(-1)
        first, second = weights.split([settled.k.shape[2], recent.k.shape[2]], dim=-1)
        return first @ settled.v.to(v.dtype) + second @ recent.v, KeyValueState(settled, recent)

    def reference(
        self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None = None, log_decay: Tensor | None = None
    ) -> Tensor:
        return masked_softmax(q, k, v, mask_of_the_past(q.shape[2], q.device), starts)

    def state_numbers(self, tokens: int) -> int:
        return tokens * (2 * self.heads * self.width + 1)


def _after(first: Past, second: Past) -> Past:
    """One stretch of tokens after another, in the number format of the later one."""
    if first.k.shape[2] == 0:
        return second
    return Past(
        torch.cat([first.k.to(second.k.dtype), second.k], dim=2),
        torch.cat([first.v.to(second.v.dtype), second.v], dim=2),
        torch.cat([first.current, second.current], dim=1),
    )


def _gathered(state: KeyValueState, new: Past) -> KeyValueState:
    return _settle(KeyValueState(state.settled, _after(state.recent, new)))


def _settle(state: KeyValueState) -> KeyValueState:
    """Let recent tokens join the others in whole blocks."""
    settled, recent = state
    whole = recent.k.shape[2] // BLOCK * BLOCK
    if not whole:
        return state
    return KeyValueState(_after(settled, _part(recent, 0, whole)), _part(recent, whole, recent.k.shape[2]))


def _part(past: Past, begin: int, end: int) -> Past:
    """The tokens from one place to another; cloned, for a view would keep all others alive."""
    k, v, current = past
    return Past(k[:, :, begin:end].clone(), v[:, :, begin:end].clone(), current[:, begin:end].clone())


def _needed(past: Past) -> Past:
    """Without what no row looks at any more, where rows began at different times or did not all take each token."""
    unused = past.k.shape[2] - int(past.current.sum(1).max())
    if not unused:
        return past
    order = past.current.int().argsort(dim=1, stable=True)[:, unused:]  # of each row, what it looks at comes last
    index = order[:, None, :, None].expand(-1, past.k.shape[1], -1, past.k.shape[3])
    return Past(past.k.gather(2, index), past.v.gather(2, index), past.current.gather(1, order))


def _all_of(k: Tensor) -> Tensor:
    """(B, T), true."""
    return torch.ones(len(k), k.shape[2], dtype=torch.bool, device=k.device)


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
