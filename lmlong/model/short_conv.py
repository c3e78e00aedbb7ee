"""Short causal convolution: depthwise, over the last few tokens; its state is the last inputs.

B batch, T time, C channels, W width.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from lmlong.attention.device_policy import FollowsPolicy

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
        x = torch.cat([tail.to(x.dtype), x], dim=1)
        weight = self.weight.to(x.dtype)
        if x.shape[1] == self.width and document_starts is None and not torch.is_grad_enabled():
            return (x * weight.mT).sum(1, keepdim=True), x[:, 1:].clone()
        block, in_document = self.policy_for(x).conv_tokens, None if document_starts is None else positions
        args = x, weight, in_document
        y = self._masked_taps(*args) if block is None else self._taps_in_blocks(*args, block)
        tail = x[:, x.shape[1] - self.width + 1 :].clone()  # a view would keep all of x alive
        if document_starts is not None:
            distance = torch.arange(self.width - 2, -1, -1, device=x.device)  # of the tail's tokens to the last one
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

    def _taps_in_blocks(self, x: Tensor, weight: Tensor, positions: Tensor | None, block: int) -> Tensor:
        """Return the same block by block. The few outputs whose taps reach into the previous document are computed a
        second time."""
        y = _Taps.apply(x, weight, block)
        if positions is None:
            return y
        rows, times = (positions < self.width - 1).nonzero(as_tuple=True)
        offsets = torch.arange(self.width, device=x.device)  # the last one is the token itself
        seen = x[rows[:, None], times[:, None] + offsets]  # (tokens, W, C)
        of_document = positions[rows, times][:, None] >= self.width - 1 - offsets
        exact = (seen * of_document[..., None] * weight.mT).sum(1)
        return y.index_put((rows, times), exact)


class _Taps(torch.autograd.Function):
    """y_t = sum_j w_j x_(t+j) by channel, for x (B, T + W - 1, C) and w (C, W). Torch's own convolution is tuned for
    images: on a CPU its backward pass takes seconds instead of milliseconds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, block: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.block = block
        return _tap_sum(x, weight.mT.contiguous(), block)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        (dy,) = grads
        width = weight.shape[1]
        padded = pad(dy, (0, 0, width - 1, width - 1))
        dx = _tap_sum(padded, weight.mT.flip(0).contiguous(), ctx.block)
        dweight = torch.zeros(width, len(weight), device=x.device, dtype=torch.promote_types(x.dtype, torch.float32))
        for row, begin, end in _blocks(dy, ctx.block):
            for tap in range(width):
                product = x[row, begin + tap : end + tap] * dy[row, begin:end]
                dweight[tap] += product.sum(0, dtype=dweight.dtype)
        return dx, dweight.mT.to(weight.dtype), None


def _tap_sum(x: Tensor, taps: Tensor, block: int) -> Tensor:
    """Return sum_j taps_j x_(t+j), (B, T, C), for x (B, T + W - 1, C) and taps (W, C)."""
    y = x.new_empty(len(x), x.shape[1] - len(taps) + 1, x.shape[2])
    for row, begin, end in _blocks(y, block):
        out = y[row, begin:end]
        torch.mul(x[row, begin:end], taps[0], out=out)
        for tap in range(1, len(taps)):
            out.addcmul_(x[row, begin + tap : end + tap], taps[tap])
    return y


def _blocks(y: Tensor, size: int) -> Iterator[tuple[int, int, int]]:
    """Iterate over the blocks of a row and times to compute at once."""
    rows, time = y.shape[:2]
    for row in range(rows):
        for begin in range(0, time, size):
            yield row, begin, min(begin + size, time)
