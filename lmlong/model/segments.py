"""The loss of a sequence of any length, and its exact gradient, in the memory of one segment.

A first reading keeps the states between segments, nothing else. A second one goes over the segments from the last to
the first: each is read again from the state before it, gives its part of the loss and its gradient at once, and hands
the gradient of that state on. To autograd all of it is one operation on the weights; a checkpoint for each segment
would keep a graph of all of them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lmlong.attention.contract import tensors
from lmlong.model.states import rebuilt

Segment = tuple[Tensor, Tensor, Tensor | None]
"""Tokens, targets and starts, each (B, T)."""

Summed = Callable[..., tuple[Tensor, Any]]
"""(tokens, targets, starts, state) -> summed nats and the state after."""

Read = Callable[..., tuple[Tensor, Any]]
"""(tokens, state, starts) -> what predicts, which nobody looks at here, and the state after."""


def split(length: int, *whole: Tensor | None) -> list[Segment]:
    """Tokens, targets and starts in segments of at most so many tokens."""
    time = next(x for x in whole if x is not None).shape[1]
    borders = range(0, time, length)
    return [tuple(None if x is None else x[:, b : b + length] for x in whole) for b in borders]  # type: ignore[misc]


def nats_of_segments(
    read: Read, summed: Summed, segments: Sequence[Segment], state: Any, weights: Sequence[Tensor]
) -> tuple[Tensor, Any]:
    """The nats of all segments, read one after the other from `state`, and the state at the end, without a gradient."""
    surroundings = _Surroundings(segments[0][0].device.type)
    before = _Bank(state, len(segments) - 1)
    for number, (tokens, _, starts) in enumerate(segments):
        with torch.no_grad(), surroundings.of(number):
            _, after = read(tokens, before.get(number), starts)
        if number + 1 < len(segments):
            before.put(number + 1, after)
    total, gradients = _from_the_last(summed, segments, before, surroundings, weights)
    return _Known.apply(total, gradients, *weights), after


def nats_by_checkpoints(summed: Summed, segments: Sequence[Segment], state: Any) -> tuple[Tensor, Any]:
    """The same by ordinary autograd, at the price of a graph that remembers each segment: for weights that come and go
    while they are in use, which one operation over all segments would not see."""
    total = None
    for segment in segments:
        nats, state = checkpoint(summed, *segment, state, use_reentrant=False)
        total = nats if total is None else total + nats
    assert total is not None
    return total, state


class _Surroundings:
    """The number format of the forward pass, and for each segment random draws of its own, the same at each reading."""

    def __init__(self, device: str):
        self.autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        self.seed = int(torch.randint(2**62, (), device="cpu"))

    @contextmanager
    def of(self, segment: int) -> Iterator[None]:
        device, dtype, enabled = self.autocast
        gpus = [torch.cuda.current_device()] if device == "cuda" else []
        with torch.autocast(device, dtype=dtype, enabled=enabled), torch.random.fork_rng(devices=gpus):
            torch.manual_seed(self.seed + segment)
            yield


def _from_the_last(
    summed: Summed, segments: Sequence[Segment], before: "_Bank", surroundings: _Surroundings, weights: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """The nats of all segments, and their gradient by each weight."""
    total, sums = torch.zeros(()), [torch.zeros_like(weight) for weight in weights]
    after: list[Tensor] = []  # the gradient of the state after a segment; none after the last
    for number in reversed(range(len(segments))):
        state, inputs = _with_gradients(before.get(number))
        with torch.enable_grad(), surroundings.of(number):
            nats, end = summed(*segments[number], state)
        ends = [(x, g) for x, g in zip(_real(end), after, strict=False) if x.requires_grad]
        outputs, slopes = [nats, *(x for x, _ in ends)], [torch.ones_like(nats), *(g for _, g in ends)]
        found = torch.autograd.grad(outputs, [*inputs, *weights], slopes, allow_unused=True)
        after = [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found, strict=False)]
        for kept, gradient in zip(sums, found[len(inputs) :], strict=True):
            if gradient is not None:
                kept += gradient
        total = total.to(nats) + nats.detach()
    return total, sums


class _Known(torch.autograd.Function):
    """A number whose gradient was found with it; asked for, it only has to be scaled."""

    @staticmethod
    def forward(ctx: Any, number: Tensor, gradients: list[Tensor], *weights: Tensor) -> Tensor:
        ctx.gradients = gradients
        return number.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (slope,) = upstream
        return (None, None, *(gradient * slope for gradient in ctx.gradients))


class _Bank:
    """The first state and those between segments, each kind of tensor in one block: a thousand small ones among large
    ones that come and go would leave the allocator with memory that it can neither use nor give back."""

    def __init__(self, first: Any, more: int):
        self.first, self.more = first, more
        self.blocks: list[Tensor] = []

    def put(self, number: int, state: Any) -> None:
        if not self.blocks:
            self.blocks = [x.new_empty(self.more, *x.shape) for x in tensors(state)]
        for block, x in zip(self.blocks, tensors(state), strict=True):
            block[number - 1] = x

    def get(self, number: int) -> Any:
        if number == 0:
            return self.first
        return rebuilt(self.first, iter(block[number - 1] for block in self.blocks))


def _with_gradients(state: Any) -> tuple[Any, list[Tensor]]:
    """The state as the beginning of a graph, and those of its tensors that gradients flow to."""
    fresh = rebuilt(state, iter([x.detach().requires_grad_(x.is_floating_point()) for x in tensors(state)]))
    return fresh, _real(fresh)


def _real(state: Any) -> list[Tensor]:
    """The tensors of a state that gradients can flow to."""
    return [x for x in tensors(state) if x.is_floating_point()]
