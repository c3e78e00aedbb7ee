"""The bidirectional attentions given by a single formula: full, efficient and linear.

B batch, H heads, T time, D head dim.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lmlong.attention.base import at_least_float32
from lmlong.attention.encoder.base import EncoderAttention
from lmlong.attention.feature_maps import FeatureMap
from lmlong.attention.linear.naive import MIN_DENOMINATOR


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
