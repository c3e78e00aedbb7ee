"""A causal scan over any length, span by span, as one autograd function: of linear attention and of the delta rule.

Saved for the backward pass are the inputs, the outputs, and the states between spans. All else, features among it, is
recomputed span by span from the last to the first, while it is in cache.

B batch, H heads, T time, F features, V value dim.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

SPAN = 512
"""Tokens computed at once, so that temporaries stay in cache."""


class QKFeatures(Protocol):
    """The features of queries and keys, each token by itself: a `FeatureMap`, or `IdentityFeatures`."""

    def query(self, q: Tensor) -> Tensor: ...

    def key(self, k: Tensor) -> Tensor: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...


class IdentityFeatures:
    """The identity, for queries and keys that are features already."""

    def query(self, q: Tensor) -> Tensor:
        return q

    def key(self, k: Tensor) -> Tensor:
        return k

    def parameters(self) -> Iterator[nn.Parameter]:
        return iter(())


class ScanInputs(NamedTuple):
    """The inputs of a scan, or of a span of it."""

    q: Tensor  # (B, H, T, ...)
    k: Tensor  # (B, H, T, ...)
    v: Tensor  # (B, H, T, V)
    document_starts: Tensor | None  # (B, T)
    log_decay: Tensor | None  # (B, H, T), or (B, H, T, F) by channel, of linear attention alone
    beta: Tensor | None = None  # (B, H, T) how much of what a key has stored the value replaces; the delta rule alone

    def span_begins(self) -> range:
        return range(0, self.q.shape[2], SPAN)

    def span(self, begin: int) -> "ScanInputs":
        place = slice(begin, begin + SPAN)
        starts = None if self.document_starts is None else self.document_starts[:, place]
        log_decay, beta = (None if gate is None else gate[:, :, place] for gate in (self.log_decay, self.beta))
        return ScanInputs(self.q[:, :, place], self.k[:, :, place], self.v[:, :, place], starts, log_decay, beta)


class ScanOutputs(NamedTuple):
    y: Tensor  # (B, H, T, V)
    denominators: Tensor | None  # (B, H, T), of linear attention

    def span(self, begin: int) -> "ScanOutputs":
        place = slice(begin, begin + SPAN)
        return ScanOutputs(self.y[:, :, place], None if self.denominators is None else self.denominators[:, :, place])


class SavedSpan(NamedTuple):
    """One span of the forward pass, with the gradients of its outputs."""

    inputs: ScanInputs
    outputs: ScanOutputs
    state: Tensor  # before the span
    dy: Tensor
    dstate: Tensor  # of the state after the span


class ScanGrads(NamedTuple):
    """The tensors that gradients are written to."""

    inputs: ScanInputs  # all but that of `document_starts`
    weights: list[Tensor]  # of the feature map, summed over the spans

    def span(self, begin: int) -> "ScanGrads":
        return ScanGrads(self.inputs.span(begin), self.weights)


class SpanKernel(Protocol):
    """The computation of a single span; a state is (B, H, F, ...)."""

    has_denominators: bool

    def forward(self, features: QKFeatures, inputs: ScanInputs, state: Tensor, out: ScanOutputs) -> Tensor:
        """Write the outputs, and return the state after the span."""
        ...

    def backward(self, features: QKFeatures, weights: list[Tensor], saved: SavedSpan, out: ScanGrads) -> Tensor:
        """Write the gradients of the inputs, add those of the weights, and return that of the state before."""
        ...


def scan(kernel: SpanKernel, features: QKFeatures, inputs: ScanInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs (B, H, T, V), and the state after the last token."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in inputs[:3])  # outputs and gradients lie alike
    return _Scan.apply(kernel, features, torch.is_grad_enabled(), state, q, k, v, *inputs[3:], *features.parameters())


@torch.no_grad()
def scan_forward(
    kernel: SpanKernel,
    features: QKFeatures,
    inputs: ScanInputs,
    state: Tensor,
    states: list[Tensor] | None = None,
) -> tuple[ScanOutputs, Tensor]:
    """Return outputs and state; the states before each span are appended to `states`, if a list is given."""
    denominators = state.new_empty(inputs.q.shape[:3]) if kernel.has_denominators else None
    outputs = ScanOutputs(empty_alike(inputs.v), denominators)
    with without_autocast(state):
        for begin in inputs.span_begins():
            if states is not None:
                states.append(state)
            state = kernel.forward(features, inputs.span(begin), state, outputs.span(begin))
    return outputs, state


def empty_alike(x: Tensor) -> Tensor:
    """Return an empty tensor in the layout of x, in which the numbers of a token are contiguous: `empty_like` alone may
    order the dimensions of an expanded tensor in another way."""
    empty = torch.empty_like(x)
    return empty if empty.stride(-1) == 1 else torch.empty_like(x, memory_format=torch.contiguous_format)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        kernel: SpanKernel,
        features: QKFeatures,
        needs_grad: bool,
        state: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        document_starts: Tensor | None,
        log_decay: Tensor | None,
        beta: Tensor | None,
        *weights: Tensor,
    ) -> tuple[Tensor, Tensor]:
        states: list[Tensor] | None = [] if needs_grad else None
        inputs = ScanInputs(q, k, v, document_starts, log_decay, beta)
        outputs, after = scan_forward(kernel, features, inputs, state, states)
        ctx.kernel, ctx.features, ctx.weights = kernel, features, len(weights)
        ctx.save_for_backward(*inputs, *outputs, *weights, *(states or ()))
        return outputs.y, after.clone() if after is state else after

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dy, dstate = grads
        saved = ctx.saved_tensors
        inputs, outputs, others = ScanInputs(*saved[:6]), ScanOutputs(*saved[6:8]), saved[8:]
        weights, states = others[: ctx.weights], others[ctx.weights :]
        needed = ctx.needs_input_grad[8:10]
        dlog_decay, dbeta = (
            dstate.new_empty(gate.shape) if gate is not None and wanted else None
            for gate, wanted in zip((inputs.log_decay, inputs.beta), needed, strict=True)
        )
        dq, dk, dv = map(empty_alike, inputs[:3])
        dinputs = ScanInputs(dq, dk, dv, None, dlog_decay, dbeta)
        out = ScanGrads(dinputs, [torch.zeros_like(weight) for weight in weights])
        with without_autocast(dstate):
            for state, begin in reversed(list(zip(states, inputs.span_begins(), strict=True))):
                dy_span = dy[:, :, begin : begin + SPAN]
                span = SavedSpan(inputs.span(begin), outputs.span(begin), state, dy_span, dstate)
                dstate = ctx.kernel.backward(ctx.features, weights, span, out.span(begin))
        return None, None, None, dstate, *out.inputs, *out.weights


class FeatureVjp:
    """The features of queries and keys, with the gradient through the feature map."""

    def __init__(self, features: QKFeatures, weights: list[Tensor], q: Tensor, k: Tensor):
        with torch.enable_grad():
            self._inputs = [q.detach().requires_grad_(), k.detach().requires_grad_(), *weights]
            self._outputs = features.query(self._inputs[0]), features.key(self._inputs[1])
        self.fq, self.fk = (x.detach() for x in self._outputs)

    def backward(self, dfq: Tensor, dfk: Tensor, dweights: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the gradients of queries and keys, and add those of the weights to `dweights`."""
        dq, dk, *others = torch.autograd.grad(self._outputs, self._inputs, (dfq, dfk), allow_unused=True)
        for total, grad in zip(dweights, others, strict=True):
            if grad is not None:
                total += grad
        return dq, dk


def without_autocast(like: Tensor) -> torch.autocast:
    """Return a context in which products are computed in the dtype of their factors: autocast would round the float32
    states to bfloat16."""
    return torch.autocast(like.device.type, enabled=False)
