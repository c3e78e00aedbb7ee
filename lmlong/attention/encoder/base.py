"""The interface of bidirectional attention.

B batch, H heads, T time, D head dim.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn


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
