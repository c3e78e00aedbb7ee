"""The loss of a text, or of the part that one of several processes reads, and its exact gradient for a text of any
length, in the memory of one segment.

A first pass keeps only the states between segments. A second pass goes from the last segment to the first: it
recomputes each segment from the state before it, adds the segment's loss and gradients, and passes the gradient of that
state to the previous segment. For autograd all of this is one function of the weights. Activation checkpointing of each
segment would keep a graph of all segments.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from lmlong.attention.base import state_tensors
from lmlong.attention.tail import after_tail, tail_of
from lmlong.errors import UsageError
from lmlong.model.base import TextModel
from lmlong.model.language_model import LanguageModel, ModelState
from lmlong.model.ngram_embedding import NgramEmbedding, RowGradients, tables_of
from lmlong.model.rope import document_positions
from lmlong.model.sequence_group import SequenceGroup, SequencePart
from lmlong.model.state import rebuild_state
from lmlong.recipe.kinds import why_state_grows

LossOf = Callable[[Tensor, slice], Tensor]
"""(the last hidden states (B, T, width) of some tokens, which tokens of the rows these are) -> their summed loss. If it
is several numbers, only the first is trained."""


def text_loss(
    model: TextModel,
    tokens: Tensor,
    targets: Tensor,
    mask: Tensor | None = None,
    state: Any = None,
    segment: int | None = None,
    wants_state: bool = True,
) -> tuple[Tensor, Any]:
    """Return the summed -log p of the targets (B, T), starting from `state`, and the state after; None unless
    `wants_state`, which saves work.

    With `segment`, the tokens (B, T) are read in segments of that many, and only the states between them are kept, so
    that the exact gradient of a text of any length takes the memory of a segment. The mask of a language model's batch
    is its document starts, that of an encoder's is its padding.
    """
    if segment is None or not torch.is_grad_enabled():
        more = {} if wants_state or not isinstance(model, LanguageModel) else {"wants_state": False}
        hidden, after = model(tokens, state, mask, **more)
        return model.loss(hidden, targets), after if wants_state else None
    return loss_in_segments(
        model, tokens, mask, state, lambda hidden, span: model.loss(hidden, targets[:, span]), segment
    )


def loss_of_part(
    model: LanguageModel,
    tokens: Tensor,
    targets: Tensor,
    document_starts: Tensor | None,
    state: ModelState | None,
    group: SequenceGroup,
) -> tuple[Tensor, ModelState]:
    """Return the summed -log p of the targets (B, T) in this process's part of the rows, starting from `state`, and the
    state after this part. All processes of the group call this with the same rows."""
    state = model.init_state(len(tokens)) if state is None else state
    part = SequencePart(group, tokens.shape[1])
    own, before = part.own, slice(part.own.start)
    starts = None if document_starts is None else document_starts[:, own]
    position, last = state.position, state.last_tokens
    if before.stop:
        starts_before = None if document_starts is None else document_starts[:, before]
        position = document_positions(starts_before, position, before.stop)[:, -1] + 1
        last = None if last is None else after_tail(last, tail_of(tokens[:, before], last.shape[1]))
    entered = state._replace(position=position, last_tokens=last)
    hidden, after = model(tokens[:, own], entered, starts, part)
    return model.loss(hidden, targets[:, own]), after


def loss_in_segments(
    model: TextModel, tokens: Tensor, mask: Tensor | None, state: Any, loss_of: LossOf, segment: int | None
) -> tuple[Tensor, Any]:
    """Return a loss of the tokens (B, T), starting from `state`, and the state after."""
    text = _Text(model, tokens, mask, loss_of)
    if segment is None or not torch.is_grad_enabled():
        return text.loss(slice(None), state)
    assert isinstance(model, LanguageModel)
    if why := why_state_grows(model.kinds):
        raise UsageError(f"segment: {why}")
    state = model.init_state(len(tokens)) if state is None else state
    segments = [slice(begin, begin + segment) for begin in range(0, tokens.shape[1], segment)]
    return _checkpointed_loss(text, segments, state) if model.partitioned else _segmented_loss(text, segments, state)


class _Text(NamedTuple):
    """The rows of a batch, and their loss."""

    model: TextModel
    tokens: Tensor  # (B, T)
    mask: Tensor | None  # (B, T)
    loss_of: LossOf

    def hidden_states(self, span: slice, state: Any) -> tuple[Tensor, Any]:
        mask = None if self.mask is None else self.mask[:, span]
        return self.model(self.tokens[:, span], state, mask)

    def loss(self, span: slice, state: Any) -> tuple[Tensor, Any]:
        """Return the loss of a span of tokens, starting from `state`, and the state after."""
        hidden, after = self.hidden_states(span, state)
        return self.loss_of(hidden, span), after


def _segmented_loss(text: _Text, segments: Sequence[slice], state: Any) -> tuple[Tensor, Any]:
    """Return the loss of consecutive segments, starting from `state`, and the last state, which has no gradient."""
    context = _ForwardContext(text.tokens.device.type)
    states = _StateBank(state, len(segments) - 1)
    for number, segment in enumerate(segments):
        with torch.no_grad(), context.of(number):
            _, after = text.hidden_states(segment, states.get(number))
        if number + 1 < len(segments):
            states.put(number + 1, after)
    weights = [weight for weight in text.model.parameters() if weight.requires_grad]
    tables = tables_of(text.model)
    with _rows_apart(tables) as drows:
        total, dweights = _backward_through_segments(text, segments, states, context, weights)
    return _KnownGradients.apply(total, _Gradients(dweights, tables, drows), *weights), after


def _checkpointed_loss(text: _Text, segments: Sequence[slice], state: Any) -> tuple[Tensor, Any]:
    """Return the same as `_segmented_loss` by activation checkpointing, with a graph of all segments. Partitioned
    weights, which are gathered only while their module computes, need this."""
    losses = []
    for segment in segments:
        loss, state = checkpoint(text.loss, segment, state, use_reentrant=False)
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
    text: _Text,
    segments: Sequence[slice],
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
            loss, after = text.loss(segments[number], state)
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
def _rows_apart(tables: NgramEmbedding | None) -> Iterator[RowGradients | None]:
    """Return a context in which the gradients of rows of tables are kept apart; None if none are trained."""
    if tables is None or tables.gradients is None:
        yield None
        return
    before = tables.gradients
    tables.gradients = RowGradients(before.rows, before.reads_values)
    try:
        yield tables.gradients
    finally:
        tables.gradients = before


class _Gradients(NamedTuple):
    """The gradients of a loss."""

    dweights: list[Tensor]
    tables: NgramEmbedding | None
    drows: RowGradients | None  # of the tables


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
            known.tables.gradients.add(rows, gradient * dloss)
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
