"""Short causal convolution: depthwise, over the last few tokens; its state is the last inputs.

B batch, T time, C channels, W width.
"""

import torch
from torch import Tensor, nn

from lmlong.attention.device_policy import FollowsPolicy
from lmlong.native.rows import kernel as rows

CODED = 3
"""Tokens in the longest code."""


class ShortConvolution(FollowsPolicy):
    """y_t = sum_j weight_j x_(t-j) over the last W tokens of the same document."""

    def __init__(self, channels: int, width: int):
        super().__init__()
        self.channels, self.width = channels, width
        self.weight = nn.Parameter(torch.empty(channels, width))

    def init_weights(self) -> None:
        """Initialize near the identity."""
        nn.init.normal_(self.weight, std=0.1)
        self.weight[:, -1] += 1

    def identity(self) -> Tensor:
        """Return the weight of an identity convolution."""
        weight = torch.zeros_like(self.weight)
        weight[:, -1] = 1
        return weight

    def init_codes(self, codes: slice, late: slice, chosen: Tensor) -> None:
        """Initialize the channels `codes` as sums, with random signs, over the last one, two or three tokens in turn.
        Initialize the channels `late` as the `chosen` codes of the previous token."""
        weight = self.weight[codes]
        reach = 1 + torch.arange(len(weight), device=weight.device)[:, None] % min(CODED, self.width - 1)
        taken = torch.arange(self.width, device=weight.device) >= self.width - reach
        signs = 2 * torch.randint_like(weight, 2) - 1
        weight = signs * taken * reach**-0.5 + 0.1 * torch.randn_like(weight)
        self.weight[codes], self.weight[late] = weight, weight[chosen].roll(-1, dims=1)
        self.weight[late, -1] = 0

    def init_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        return torch.zeros(batch, self.width - 1, self.channels, device=device, dtype=dtype)

    def forward(
        self, x: Tensor, tail: Tensor, positions: Tensor, document_starts: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs for x (B, T, C), which follows `tail` (B, W - 1, C), and the new tail. `positions` (B, T)
        counts the earlier tokens of each document."""
        tail, before = tail.to(x.dtype), self.width - 1
        in_document = None if document_starts is None else positions
        if x.shape[1] == 1 and document_starts is None and not torch.is_grad_enabled():
            window = torch.cat([tail, x], dim=1)
            return (window * self.weight.to(x.dtype).mT).sum(1, keepdim=True), window[:, 1:].clone()
        if self.policy_for(x).native_rows and before and rows.can_compute(x, weight=self.weight):
            y = rows.convolution(x, tail, self.weight, in_document)
        else:
            y = self._masked_taps(torch.cat([tail, x], dim=1), self.weight.to(x.dtype), in_document)
        last = torch.cat([tail, x[:, max(x.shape[1] - before, 0) :]], dim=1)
        tail = last[:, last.shape[1] - before :]
        if document_starts is not None:
            distance = torch.arange(before - 1, -1, -1, device=x.device)  # of the tail's tokens to the last one
            tail = tail * (positions[:, -1:] >= distance)[..., None]
        return y, tail

    def _masked_taps(self, x: Tensor, weight: Tensor, positions: Tensor | None) -> Tensor:
        """Return the sum over taps of all tokens at once; with `positions`, over taps of the same document."""
        y, time = None, x.shape[1] - self.width + 1
        for tap in range(self.width):
            product = x[:, tap : tap + time] * weight[:, tap]
            distance = self.width - 1 - tap
            if positions is not None and distance:
                product = product * (positions >= distance)[..., None]
            y = product if y is None else y + product
        assert y is not None
        return y
