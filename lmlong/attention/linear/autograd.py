"""The linear attention scan over any length, span by span, as one autograd function.

Saved for the backward pass are queries, keys, values and outputs, one denominator a token, and the states between
spans. All else, features among it, is recomputed span by span from the last to the first, while it is in cache.

B batch, H heads, T time, F features, V value dim.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

SPAN = 512
"""Tokens computed at once, so that temporaries stay in cache."""

MIN_DENOMINATOR = 1e-30
"""Lower bound of denominators, so that nothing is ever divided by 0."""


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
    log_decay: Tensor | None  # (B, H, T)

    def span_begins(self) -> range:
        return range(0, self.q.shape[2], SPAN)

    def span(self, begin: int) -> "ScanInputs":
        q, k, v = (x[:, :, begin : begin + SPAN] for x in self[:3])
        document_starts = None if self.document_starts is None else self.document_starts[:, begin : begin + SPAN]
        log_decay = None if self.log_decay is None else self.log_decay[:, :, begin : begin + SPAN]
        return ScanInputs(q, k, v, document_starts, log_decay)


class ScanOutputs(NamedTuple):
    y: Tensor  # (B, H, T, V)
    denominators: Tensor  # (B, H, T)

    def span(self, begin: int) -> "ScanOutputs":
        y, denominators = (x[:, :, begin : begin + SPAN] for x in self)
        return ScanOutputs(y, denominators)


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
    """The computation of a single span; its states are (B, H, F, V + 1), with z as the last column."""

    def forward(self, features: QKFeatures, inputs: ScanInputs, state: Tensor, out: ScanOutputs) -> Tensor:
        """Write the outputs, and return the state after the span."""
        ...

    def backward(self, features: QKFeatures, weights: list[Tensor], saved: SavedSpan, out: ScanGrads) -> Tensor:
        """Write the gradients of the inputs, add those of the weights, and return that of the state before."""
        ...


Scan = Callable[[QKFeatures, ScanInputs, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""The scan of one implementation: (features, inputs, S, z) -> outputs, S and z."""


def scan(
    kernel: SpanKernel, features: QKFeatures, inputs: ScanInputs, S: Tensor, z: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs (B, H, T, V), and the state after the last token."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in inputs[:3])  # outputs and gradients lie alike
    return _Scan.apply(kernel, features, torch.is_grad_enabled(), S, z, q, k, v, *inputs[3:], *features.parameters())


@torch.no_grad()
def scan_forward(
    kernel: SpanKernel,
    features: QKFeatures,
    inputs: ScanInputs,
    S: Tensor,
    z: Tensor,
    states: list[Tensor] | None = None,
) -> tuple[ScanOutputs, Tensor, Tensor]:
    """Return outputs, S and z; the states before each span are appended to `states`, if a list is given."""
    outputs = ScanOutputs(torch.empty_like(inputs.v), S.new_empty(inputs.q.shape[:3]))
    state = torch.cat([S, z[..., None]], dim=-1)
    with without_autocast(S):
        for begin in inputs.span_begins():
            if states is not None:
                states.append(state)
            state = kernel.forward(features, inputs.span(begin), state, outputs.span(begin))
    return outputs, state[..., :-1].clone(), state[..., -1].clone()


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        kernel: SpanKernel,
        features: QKFeatures,
        needs_grad: bool,
        S: Tensor,
        z: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        document_starts: Tensor | None,
        log_decay: Tensor | None,
        *weights: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        states: list[Tensor] | None = [] if needs_grad else None
        inputs = ScanInputs(q, k, v, document_starts, log_decay)
        outputs, S, z = scan_forward(kernel, features, inputs, S, z, states)
        ctx.kernel, ctx.features, ctx.weights = kernel, features, len(weights)
        ctx.save_for_backward(*inputs, *outputs, *weights, *(states or ()))
        return outputs.y, S, z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dy, dS, dz = grads
        dstate = torch.cat([dS, dz[..., None]], dim=-1)
        q, k, v, document_starts, log_decay, y, denominators, *others = ctx.saved_tensors
        inputs, outputs = ScanInputs(q, k, v, document_starts, log_decay), ScanOutputs(y, denominators)
        weights, states = others[: ctx.weights], others[ctx.weights :]
        decays = log_decay is not None and ctx.needs_input_grad[9]
        dlog_decay = dS.new_empty(y.shape[:3]) if decays else None
        dinputs = ScanInputs(torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None, dlog_decay)
        out = ScanGrads(dinputs, [torch.zeros_like(weight) for weight in weights])
        with without_autocast(dS):
            for state, begin in reversed(list(zip(states, inputs.span_begins(), strict=True))):
                dy_span = dy[:, :, begin : begin + SPAN]
                saved = SavedSpan(inputs.span(begin), outputs.span(begin), state, dy_span, dstate)
                dstate = ctx.kernel.backward(ctx.features, weights, saved, out.span(begin))
        return (None, None, None, dstate[..., :-1], dstate[..., -1], *out.inputs, *out.weights)


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
