"""The loss of a sequence of any length, and its exact gradient, in the memory of one segment.

A first pass keeps the states between segments, nothing else. A second one goes over the segments from the last to the
first: each is computed again from the state before it, adds its part of the loss and the gradient at once, and passes
on the gradient of that state. To autograd all of it is one function of the weights; activation checkpointing of each
segment would keep a graph of all of them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from lmlong.attention.base import state_tensors
from lmlong.model.state import rebuild_state


class Segment(NamedTuple):
    """A segment of every row."""

    tokens: Tensor  # (B, T)
    targets: Tensor  # (B, T)
    document_starts: Tensor | None  # (B, T)
    teacher_hidden: Tensor | None  # (B, T, width) the last hidden states of a teacher


SegmentLoss = Callable[[Segment, Any], tuple[Tensor, Any]]
"""(segment, state) -> summed loss and the state after. Of a loss of several numbers the first alone is learned."""

SegmentForward = Callable[..., tuple[Tensor, Any]]
"""(tokens, state, document_starts) -> hidden states, which are not used here, and the state after."""


def split_segments(length: int, whole: Segment) -> list[Segment]:
    """Split rows into segments of at most `length` tokens."""
    begins = range(0, whole.tokens.shape[1], length)
    return [Segment(*(None if x is None else x[:, b : b + length] for x in whole)) for b in begins]  # type: ignore[arg-type]


def segmented_loss(
    forward: SegmentForward,
    segment_loss: SegmentLoss,
    segments: Sequence[Segment],
    state: Any,
    weights: Sequence[Tensor],
) -> tuple[Tensor, Any]:
    """Return the loss of all segments in turn from `state`, and the state after the last, without a gradient."""
    context = _ForwardContext(segments[0].tokens.device.type)
    states = _StateBank(state, len(segments) - 1)
    for number, segment in enumerate(segments):
        with torch.no_grad(), context.of(number):
            _, after = forward(segment.tokens, states.get(number), segment.document_starts)
        if number + 1 < len(segments):
            states.put(number + 1, after)
    total, grads = _backward_through_segments(segment_loss, segments, states, context, weights)
    return _KnownGradients.apply(total, grads, *weights), after


def checkpointed_loss(segment_loss: SegmentLoss, segments: Sequence[Segment], state: Any) -> tuple[Tensor, Any]:
    """Return the same by activation checkpointing, with a graph of all segments: for weights that are gathered only
    while their module computes, which one function of all segments would not see."""
    total = None
    for segment in segments:
        loss, state = checkpoint(segment_loss, segment, state, use_reentrant=False)
        total = loss if total is None else total + loss
    assert total is not None
    return total, state


class _ForwardContext:
    """The autocast of the forward pass, and a random seed for each segment, the same in both passes."""

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


def _backward_through_segments(
    segment_loss: SegmentLoss,
    segments: Sequence[Segment],
    states: "_StateBank",
    context: _ForwardContext,
    weights: Sequence[Tensor],
) -> tuple[Tensor, list[Tensor]]:
    """Return the loss of all segments, and its gradient for each weight."""
    total, dweights = torch.zeros(()), [torch.zeros_like(weight) for weight in weights]
    dstate: list[Tensor] = []  # the gradient of the state after a segment; empty after the last
    for number in reversed(range(len(segments))):
        state, inputs = _as_leaves(states.get(number))
        with torch.enable_grad(), context.of(number):
            loss, after = segment_loss(segments[number], state)
        ends = [(x, g) for x, g in zip(_floating(after), dstate, strict=False) if x.requires_grad]
        outputs, grad_outputs = [loss, *(x for x, _ in ends)], [torch.ones_like(loss), *(g for _, g in ends)]
        grads = torch.autograd.grad(outputs, [*inputs, *weights], grad_outputs, allow_unused=True)
        dstate = [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, grads, strict=False)]
        for dweight, grad in zip(dweights, grads[len(inputs) :], strict=True):
            if grad is not None:
                dweight += grad
        total = total.to(loss) + loss.detach()
    return total, dweights


class _KnownGradients(torch.autograd.Function):
    """A loss, the first number of some, with known gradients, which the backward pass only scales."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, dweights: list[Tensor], *weights: Tensor) -> Tensor:
        ctx.dweights = dweights
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dloss = grads[0].flatten()[0]
        return (None, None, *(dweight * dloss for dweight in ctx.dweights))


class _StateBank:
    """The first state and those between segments, each kind of tensor in one block: a thousand small tensors among
    large temporary ones would fragment the allocator's memory."""

    def __init__(self, first: Any, more: int):
        self.first, self.more = first, more
        self.blocks: list[Tensor] = []

    def put(self, number: int, state: Any) -> None:
        if not self.blocks:
            self.blocks = [x.new_empty(self.more, *x.shape) for x in state_tensors(state)]
        for block, x in zip(self.blocks, state_tensors(state), strict=True):
            block[number - 1] = x

    def get(self, number: int) -> Any:
        if number == 0:
            return self.first
        return rebuild_state(self.first, iter(block[number - 1] for block in self.blocks))


def _as_leaves(state: Any) -> tuple[Any, list[Tensor]]:
    """Return the state as leaves of a new graph, and those of its tensors that gradients flow to."""
    tensors = [x.detach().requires_grad_(x.is_floating_point()) for x in state_tensors(state)]
    fresh = rebuild_state(state, iter(tensors))
    return fresh, _floating(fresh)


def _floating(state: Any) -> list[Tensor]:
    """Return the tensors of a state that gradients can flow to."""
    return [x for x in state_tensors(state) if x.is_floating_point()]
