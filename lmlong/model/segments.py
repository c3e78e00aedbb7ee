"""The loss of a sequence of any length, and its exact gradient, in the memory of one segment.

The states between segments are kept, nothing else. The backward pass goes over the segments from the last to the
first: it computes each one again from the state before it, and hands the gradient of that state on. To autograd all of
it is one operation on the weights; a checkpoint for each segment would keep a graph of all of them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lmlong.attention.contract import tensors

Segment = tuple[Tensor, Tensor, Tensor | None]
"""Tokens, targets and starts, each (B, T)."""

Summed = Callable[..., tuple[Tensor, Any]]
"""(tokens, targets, starts, state) -> summed nats and the state after."""


def split(length: int, *whole: Tensor | None) -> list[Segment]:
    """Tokens, targets and starts in segments of at most so many tokens."""
    time = next(x for x in whole if x is not None).shape[1]
    borders = range(0, time, length)
    return [tuple(None if x is None else x[:, b : b + length] for x in whole) for b in borders]  # type: ignore[misc]


def nats_of_segments(
    summed: Summed, segments: Sequence[Segment], state: Any, weights: Sequence[Tensor]
) -> tuple[Tensor, Any]:
    """The nats of all segments, read one after the other from `state`, and the state at the end, without a gradient."""
    carrier = _Carrier(summed, segments, state)
    total = _Segmented.apply(carrier, *weights)
    return total, carrier.state


def nats_by_checkpoints(summed: Summed, segments: Sequence[Segment], state: Any) -> tuple[Tensor, Any]:
    """The same by ordinary autograd, at the price of a graph that remembers each segment: for weights that come and go
    while they are in use, which one operation over all segments would not see."""
    total = None
    for segment in segments:
        nats, state = checkpoint(summed, *segment, state, use_reentrant=False)
        total = nats if total is None else total + nats
    assert total is not None
    return total, state


class _Carrier:
    """What is no tensor on its way into an operation of autograd, and the last state on its way out."""

    def __init__(self, summed: Summed, segments: Sequence[Segment], state: Any):
        self.summed, self.segments, self.state = summed, segments, state
        device = segments[0][0].device.type
        self.autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        self.seed = int(torch.randint(2**62, (), device="cpu"))

    @contextmanager
    def surroundings(self, number: int) -> Iterator[None]:
        """The number format of the forward pass, and for each segment its own random draws, the same each time."""
        device, dtype, enabled = self.autocast
        gpus = [torch.cuda.current_device()] if device == "cuda" else []
        with torch.autocast(device, dtype=dtype, enabled=enabled), torch.random.fork_rng(devices=gpus):
            torch.manual_seed(self.seed + number)
            yield


class _Segmented(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, carrier: _Carrier, *weights: Tensor) -> Tensor:
        ctx.carrier, ctx.first = carrier, carrier.state
        ctx.bank = _Bank(len(carrier.segments) - 1)
        state, total = carrier.state, None
        for number, segment in enumerate(carrier.segments):
            with carrier.surroundings(number):
                nats, state = carrier.summed(*segment, state)
            total = nats if total is None else total + nats
            if number < len(carrier.segments) - 1:
                ctx.bank.put(number, state)
        carrier.state = state
        ctx.save_for_backward(*weights)
        assert total is not None
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        carrier, weights, (upstream,) = ctx.carrier, ctx.saved_tensors, gradients
        sums = [torch.zeros_like(weight) for weight in weights]
        after: list[Tensor] = []  # the gradient of the state after a segment; none after the last
        for number in reversed(range(len(carrier.segments))):
            before = ctx.bank.get(number - 1) if number else ctx.first
            state, inputs = _with_gradients(before)
            with torch.enable_grad(), carrier.surroundings(number):
                nats, end = carrier.summed(*carrier.segments[number], state)
            ends = [(x, g) for x, g in zip(_real(end), after, strict=False) if x.requires_grad]
            outputs, slopes = [nats, *(x for x, _ in ends)], [upstream, *(g for _, g in ends)]
            found = torch.autograd.grad(outputs, [*inputs, *weights], slopes, allow_unused=True)
            after = [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found, strict=False)]
            for total, gradient in zip(sums, found[len(inputs) :], strict=True):
                if gradient is not None:
                    total += gradient
        return (None, *sums)


class _Bank:
    """The states between segments, each kind of tensor in one block: a thousand small ones among large ones that come
    and go would leave the allocator with memory that it can neither use nor give back."""

    def __init__(self, states: int):
        self.states = states
        self.blocks: list[Tensor] = []
        self.like: Any = None

    def put(self, number: int, state: Any) -> None:
        if not self.blocks:
            self.like = state
            self.blocks = [x.new_empty(self.states, *x.shape) for x in tensors(state)]
        for block, x in zip(self.blocks, tensors(state), strict=True):
            block[number] = x

    def get(self, number: int) -> Any:
        return rebuilt(self.like, iter(block[number] for block in self.blocks))


def _with_gradients(state: Any) -> tuple[Any, list[Tensor]]:
    """The state as the beginning of a graph, and those of its tensors that gradients flow to."""
    fresh = rebuilt(state, iter([x.detach().requires_grad_(x.is_floating_point()) for x in tensors(state)]))
    return fresh, _real(fresh)


def _real(state: Any) -> list[Tensor]:
    """The tensors of a state that gradients can flow to."""
    return [x for x in tensors(state) if x.is_floating_point()]


def detached(state: Any) -> Any:
    """The state without the graph that made it."""
    return rebuilt(state, iter([x.detach() for x in tensors(state)]))


def rebuilt(like: Any, others: Iterator[Tensor]) -> Any:
    """A state of the same nesting from other tensors."""
    if isinstance(like, Tensor):
        return next(others)
    if like is None:
        return None
    parts = [rebuilt(part, others) for part in like]
    return type(like)(*parts) if hasattr(like, "_fields") else tuple(parts)
