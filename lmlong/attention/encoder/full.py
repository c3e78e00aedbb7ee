"""Softmax attention to all tokens."""

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lmlong.attention.encoder.base import EncoderAttention


class FullAttention(EncoderAttention):
    """softmax(Q K^T / sqrt(D)) V."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return scaled_dot_product_attention(q, k, v, attn_mask=None if mask is None else mask[:, None, None])

    def definition(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v
