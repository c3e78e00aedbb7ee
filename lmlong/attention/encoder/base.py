"""Bidirectional attention: its interface, and the kinds that are a single formula: full, efficient and linear.

B batch, H heads, T time, D head dim.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from lmlong.attention.base import at_least_float32
from lmlong.attention.feature_maps import FeatureMap
from lmlong.attention.linear.naive import MIN_DENOMINATOR


class EncoderAttention(nn.Module, ABC):
    """Attention in which each output depends on every token of its row, so that it cannot generate text.

    q, k, v: (B, H, T, D). `padding` (B, T) is true after the last token of each row. Padding does not change the
    outputs of a row's tokens; outputs at padding are 0.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None = None) -> Tensor:
        """Return the outputs (B, H, T, D)."""
        if padding is None:
            return self.attend(q, k, v, None)
        # a row with only padding attends to all of it, to avoid division by 0; its outputs are masked
        mask = ~padding | padding.all(1, keepdim=True)
        return self.attend(q, k, v, mask).masked_fill(padding[:, None, :, None], 0)

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Return the outputs of all tokens. They attend to keys where `mask` (B, T) is true, or to all if None."""

    def reference(self, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None = None) -> Tensor:
        """Return the outputs by definition, computed for each row separately without padding; `forward` must equal
        them."""
        y = torch.zeros_like(v)
        for row in range(len(q)):
            time = q.shape[2] if padding is None else int((~padding[row]).sum())
            if time:
                y[row, :, :time] = self.definition(*(x[row : row + 1, :, :time] for x in (q, k, v)))[0]
        return y

    @abstractmethod
    def definition(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the outputs of one row (B = 1) without padding, by the formula. Slow; used as the reference."""


class FullAttention(EncoderAttention):
    """softmax(Q K^T / sqrt(D)) V."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return scaled_dot_product_attention(q, k, v, attn_mask=None if mask is None else mask[:, None, None])

    def definition(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v


class EfficientAttention(EncoderAttention):
    """softmax(Q) (softmax(K)^T V), over features for queries and over the sequence for keys (Shen et al. 2018)."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None:
            k = k.masked_fill(~mask[:, None, :, None], -torch.inf)
        return q.softmax(-1).to(v.dtype) @ (k.softmax(-2).to(v.dtype).mT @ v)

    def definition(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q.softmax(-1) @ k.softmax(-2).mT) @ v


class BidirectionalLinearAttention(EncoderAttention):
    """phi(Q) (phi(K)^T V) / phi(Q) (phi(K)^T 1): S and z of the causal form, summed over all keys at once."""

    def __init__(self, feature_map: FeatureMap):
        super().__init__()
        self.feature_map = feature_map

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        dtype = at_least_float32(v.dtype)
        with torch.autocast(q.device.type, enabled=False):
            fq, fk = self.feature_map.query(q).to(dtype), self.feature_map.key(k).to(dtype)
            if mask is not None:
                # mask the features, not the keys: the features of a zero key are not 0
                fk = fk.masked_fill(~mask[:, None, :, None], 0)
            S, z = fk.mT @ v.to(dtype), fk.sum(-2)
            return (fq @ S / (fq @ z[..., None]).clamp(min=MIN_DENOMINATOR)).to(v.dtype)

    def definition(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = self.feature_map.query(q) @ self.feature_map.key(k).mT
        return weights @ v / weights.sum(-1, keepdim=True)
