"""Attention to all of a text, before and after each token: for encoders only, behind a contract of its own.

B batch, H heads, T time.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from lmlong.attention.contract import at_least_float32
from lmlong.attention.features import FeatureMap
from lmlong.attention.scan import SMALLEST


class EncoderAttention(nn.Module, ABC):
    """Attention whose every output depends on every token of its row, so that it can neither predict nor be stepped.

    q, k, v: (B, H, T, width). `padding` (B, T) is true where a row has no token, which is after its last one. A padded
    row gives what it gives alone, and 0 where it has no token.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None = None) -> Tensor:
        """Outputs (B, H, T, width)."""
        if padding is None:
            return self.attend(q, k, v, None)
        # a row of padding alone sees all of it, so that nothing is divided by 0; none of that comes out
        seen = ~padding | padding.all(1, keepdim=True)
        return self.attend(q, k, v, seen).masked_fill(padding[:, None, :, None], 0)

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
        """The outputs of all places, where keys and values count only at those that are `seen` (B, T)."""

    def reference(self, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None = None) -> Tensor:
        """What `forward` must equal: the definition of each row alone, without its padding."""
        y = torch.zeros_like(v)
        for row in range(len(q)):
            time = q.shape[2] if padding is None else int((~padding[row]).sum())
            if time:
                y[row, :, :time] = self.definition(*(x[row : row + 1, :, :time] for x in (q, k, v)))[0]
        return y

    @abstractmethod
    def definition(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The outputs of one row (B = 1) without padding, written from the formula. Slow; the oracle."""


class FullAttention(EncoderAttention):
    """softmax(Q K^T / sqrt(width)) V."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
        return scaled_dot_product_attention(q, k, v, attn_mask=None if seen is None else seen[:, None, None])

    def definition(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v


class EfficientAttention(EncoderAttention):
    """softmax(Q) (softmax(K)^T V), over features for queries and over the sequence for keys (Shen et al. 2018)."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
        if seen is not None:
            k = k.masked_fill(~seen[:, None, :, None], -torch.inf)
        return q.softmax(-1).to(v.dtype) @ (k.softmax(-2).to(v.dtype).mT @ v)

    def definition(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q.softmax(-1) @ k.softmax(-2).mT) @ v


class BidirectionalLinearAttention(EncoderAttention):
    """phi(Q) (phi(K)^T V) / phi(Q) (phi(K)^T 1): the S and z of the causal form, summed over all keys at once."""

    def __init__(self, features: FeatureMap):
        super().__init__()
        self.feature_map = features

    def attend(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
        precise = at_least_float32(v.dtype)
        with torch.autocast(q.device.type, enabled=False):
            fq, fk = self.feature_map.query(q).to(precise), self.feature_map.key(k).to(precise)
            if seen is not None:
                # the features, not the keys: those of a key of 0 are not 0
                fk = fk.masked_fill(~seen[:, None, :, None], 0)
            S, z = fk.mT @ v.to(precise), fk.sum(-2)
            return (fq @ S / (fq @ z[..., None]).clamp(min=SMALLEST)).to(v.dtype)

    def definition(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = self.feature_map.query(q) @ self.feature_map.key(k).mT
        return weights @ v / weights.sum(-1, keepdim=True)
