"""The loss of a sequence of any length, and its exact gradient, in the memory of one segment.

A first pass keeps only the states between segments. A second pass goes from the last segment to the first: it
recomputes each segment from the state before it, adds the segment's loss and gradients, and passes the gradient of that
state to the previous segment. For autograd all of this is one function of the weights. Activation checkpointing of each
segment would keep a graph of all segments.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from lmlong.attention.base import state_tensors
from lmlong.model.loss import TeacherOutput
from lmlong.model.ngram_embedding import NgramEmbedding, RowGradients
from lmlong.model.state import rebuild_state


class Segment(NamedTuple):
    """Consecutive tokens of every row."""

    tokens: Tensor  # (B, T)
    targets: Tensor  # (B, T)
    document_starts: Tensor | None = None  # (B, T)
    teacher: TeacherOutput | None = None

    def split(self, length: int) -> "list[Segment]":
        """Split into segments of up to `length` tokens."""
        parts = []
        for begin in range(0, self.tokens.shape[1], length):
            span = slice(begin, begin + length)
            starts = None if self.document_starts is None else self.document_starts[:, span]
            teacher = self.teacher and self.teacher.between(span)
            parts.append(Segment(self.tokens[:, span], self.targets[:, span], starts, teacher))
        return parts


class SegmentModel(Protocol):
    ngram_embedding: NgramEmbedding | None

    def hidden_states(self, tokens: Tensor, state: Any, document_starts: Tensor | None) -> tuple[Tensor, Any]: ...

    def segment_loss(self, segment: Segment, state: Any) -> tuple[Tensor, Any]:
        """Return the summed loss and the state after. If the loss is several numbers, only the first is trained."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]: ...


def segmented_loss(model: SegmentModel, segments: Sequence[Segment], state: Any) -> tuple[Tensor, Any]:
    """Return the loss of consecutive segments, starting from `state`, and the last state, which has no gradient."""
    context = _ForwardContext(segments[0].tokens.device.type)
    states = _StateBank(state, len(segments) - 1)
    for number, segment in enumerate(segments):
        with torch.no_grad(), context.of(number):
            _, after = model.hidden_states(segment.tokens, states.get(number), segment.document_starts)
        if number + 1 < len(segments):
            states.put(number + 1, after)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    with _rows_apart(model) as drows:
        total, dweights = _backward_through_segments(model, segments, states, context, weights)
    return _KnownGradients.apply(total, _Gradients(model, dweights, drows), *weights), after


def checkpointed_loss(model: SegmentModel, segments: Sequence[Segment], state: Any) -> tuple[Tensor, Any]:
    """Return the same as `segmented_loss` by activation checkpointing, with a graph of all segments. Partitioned
    weights, which are gathered only while their module computes, need this."""
    losses = []
    for segment in segments:
        loss, state = checkpoint(model.segment_loss, segment, state, use_reentrant=False)
        losses.append(loss)
    return sum(losses[1:], losses[0]), state


class _ForwardContext:
    """The autocast of the forward pass and a random seed for each segment, for use in both passes."""

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
    model: SegmentModel,
    segments: Sequence[Segment],
    states: "_StateBank",
    context: _ForwardContext,
    weights: Sequence[Tensor],
) -> tuple[Tensor, list[Tensor]]:
    """Return the loss of all segments, and its gradient for each weight."""
    total: Any = 0.0
    dweights = [torch.zeros_like(weight) for weight in weights]
    dstate: list[Tensor] = []  # the gradient of the state after a segment; empty after the last
    for number in reversed(range(len(segments))):
        state = _detached(states.get(number))
        inputs = _floating(state)
        with torch.enable_grad(), context.of(number):
            loss, after = model.segment_loss(segments[number], state)
        ends = [(x, dx) for x, dx in zip(_floating(after), dstate, strict=False) if x.requires_grad]
        outputs, grad_outputs = [loss, *(x for x, _ in ends)], [torch.ones_like(loss), *(dx for _, dx in ends)]
        grads = torch.autograd.grad(outputs, [*inputs, *weights], grad_outputs, allow_unused=True)
        dstate = [torch.zeros_like(x) if dx is None else dx for x, dx in zip(inputs, grads, strict=False)]
        for dweight, grad in zip(dweights, grads[len(inputs) :], strict=True):
            if grad is not None:
                dweight += grad
        total = total + loss.detach()
    return total, dweights


@contextmanager
def _rows_apart(model: SegmentModel) -> Iterator[RowGradients | None]:
    """Return a context in which the gradients of rows of the model's tables are kept apart; None if it trains none."""
    tables = model.ngram_embedding
    if tables is None or tables.gradients is None:
        yield None
        return
    apart = RowGradients(tables.gradients.rows, tables.gradients.reads_values)
    with tables.collecting(apart):
        yield apart


class _Gradients(NamedTuple):
    """The gradients of a loss."""

    model: SegmentModel
    dweights: list[Tensor]
    drows: RowGradients | None  # of the model's tables


class _KnownGradients(torch.autograd.Function):
    """A loss with precomputed gradients, which the backward pass scales. Of several numbers, the first is the loss."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, known: _Gradients, *weights: Tensor) -> Tensor:
        ctx.known = known
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dloss, known = grads[0].flatten()[0], ctx.known
        if known.drows is not None and known.drows.pieces:
            rows, gradient = known.drows.take()
            known.model.ngram_embedding.gradients.add(rows, gradient * dloss)
        return (None, None, *(dweight * dloss for dweight in known.dweights))


class _StateBank:
    """The first state and the states between segments. Each state tensor has one block for all segments: a thousand
    small tensors among large temporary ones would fragment the allocator's memory."""

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


def _detached(state: Any) -> Any:
    """Return the state as leaves of a new graph."""
    return rebuild_state(state, iter([x.detach().requires_grad_(x.is_floating_point()) for x in state_tensors(state)]))


def _floating(state: Any) -> list[Tensor]:
    """Return the tensors of a state that can have gradients."""
    return [x for x in state_tensors(state) if x.is_floating_point()]
