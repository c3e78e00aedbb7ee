"""The interface of bidirectional attention.

B batch, H heads, T time, D head dim.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn


class EncoderAttention(nn.Module, ABC):
    """Attention in which each output depends on every token of its row, so that it can neither predict nor decode.

    q, k, v: (B, H, T, D). `padding` (B, T) is true where a row has no token, which is after its last one. A padded
    row has the outputs that it has alone, and 0 where it has no token.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None = None) -> Tensor:
        """Return the outputs (B, H, T, D)."""
        if padding is None:
            return self.attend(q, k, v, None)
        # a row of padding alone attends to all of it, so that nothing is divided by 0; its outputs are masked
        mask = ~padding | padding.all(1, keepdim=True)
        return self.attend(q, k, v, mask).masked_fill(padding[:, None, :, None], 0)

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Return the outputs of all tokens, from the keys and values where `mask` (B, T) is true; None: from all."""

    def reference(self, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None = None) -> Tensor:
        """Return the definition of each row alone, without its padding; `forward` must equal it."""
        y = torch.zeros_like(v)
        for row in range(len(q)):
            time = q.shape[2] if padding is None else int((~padding[row]).sum())
            if time:
                y[row, :, :time] = self.definition(*(x[row : row + 1, :, :time] for x in (q, k, v)))[0]
        return y

    @abstractmethod
    def definition(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the outputs of one row (B = 1) without padding, by the formula. Slow; the reference."""
