"""Efficient attention (Shen et al. 2018)."""

import torch
from torch import Tensor

from lmlong.attention.encoder.base import EncoderAttention


class EfficientAttention(EncoderAttention):
    """softmax(Q) (softmax(K)^T V), over features for queries and over the sequence for keys (Shen et al. 2018)."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None:
            k = k.masked_fill(~mask[:, None, :, None], -torch.inf)
        return q.softmax(-1).to(v.dtype) @ (k.softmax(-2).to(v.dtype).mT @ v)

    def definition(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q.softmax(-1) @ k.softmax(-2).mT) @ v
