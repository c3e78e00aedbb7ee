"""The causal scan over texts of any length, span by span, as one operation of autograd.

Kept for the backward pass are queries, keys, values and outputs, a denominator for each token, and the states between
spans. All else, the features among it, is computed again, span by span from the last to the first, while in cache.

B batch, H heads, T time, F features, E value width.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

SPAN = 512
"""Tokens that are worked on at once, so that temporaries stay in cache."""

SMALLEST = 1e-30
"""A denominator below this is taken for this, so that nothing is ever divided by 0."""


class Features(Protocol):
    """What makes features of queries and keys, each token by itself."""

    def query(self, q: Tensor) -> Tensor: ...

    def key(self, k: Tensor) -> Tensor: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...


class Given:
    """Queries and keys that are features already."""

    def query(self, q: Tensor) -> Tensor:
        return q

    def key(self, k: Tensor) -> Tensor:
        return k

    def parameters(self) -> Iterator[nn.Parameter]:
        return iter(())


class Inputs(NamedTuple):
    """What is read, or a span of it."""

    q: Tensor  # (B, H, T, ...)
    k: Tensor  # (B, H, T, ...)
    v: Tensor  # (B, H, T, E)
    starts: Tensor | None  # (B, T)
    log_decay: Tensor | None  # (B, H, T)

    def borders(self) -> range:
        return range(0, self.q.shape[2], SPAN)

    def span(self, begin: int) -> "Inputs":
        q, k, v = (x[:, :, begin : begin + SPAN] for x in self[:3])
        starts = None if self.starts is None else self.starts[:, begin : begin + SPAN]
        log_decay = None if self.log_decay is None else self.log_decay[:, :, begin : begin + SPAN]
        return Inputs(q, k, v, starts, log_decay)


Attend = Callable[[Features, Inputs, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""From features, inputs, S and z to outputs, S and z."""


class Outputs(NamedTuple):
    y: Tensor  # (B, H, T, E)
    denominators: Tensor  # (B, H, T)

    def span(self, begin: int) -> "Outputs":
        y, denominators = (x[:, :, begin : begin + SPAN] for x in self)
        return Outputs(y, denominators)


class Done(NamedTuple):
    """A span that was read, and the gradients that come back to it."""

    inputs: Inputs
    outputs: Outputs
    state: Tensor  # before it
    dy: Tensor
    dstate: Tensor  # of the state after it


class Slopes(NamedTuple):
    """Where gradients go to."""

    inputs: Inputs  # but for starts
    weights: list[Tensor]  # summed over all spans

    def span(self, begin: int) -> "Slopes":
        return Slopes(self.inputs.span(begin), self.weights)


class Engine(Protocol):
    """What computes a single span; its states are (B, H, F, E + 1), with z as the last column."""

    def read(self, features: Features, inputs: Inputs, state: Tensor, into: Outputs) -> Tensor:
        """Writes the outputs, and returns the state after the span."""
        ...

    def find_slopes(self, features: Features, weights: list[Tensor], done: Done, into: Slopes) -> Tensor:
        """Writes the gradients of the inputs, adds those of the weights, and returns that of the state before."""
        ...


def attend(engine: Engine, features: Features, inputs: Inputs, S: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs (B, H, T, E), and the state after the last token."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in inputs[:3])  # outputs and gradients lie alike
    return _Attend.apply(engine, features, torch.is_grad_enabled(), S, z, q, k, v, *inputs[3:], *features.parameters())


@torch.no_grad()
def attended(
    engine: Engine, features: Features, inputs: Inputs, S: Tensor, z: Tensor, kept: list[Tensor] | None = None
) -> tuple[Outputs, Tensor, Tensor]:
    """Outputs, S and z; the states before each span are kept in the list, if one is given."""
    outputs = Outputs(torch.empty_like(inputs.v), S.new_empty(inputs.q.shape[:3]))
    state = torch.cat([S, z[..., None]], dim=-1)
    with _in_their_own_type(S):
        for begin in inputs.borders():
            if kept is not None:
                kept.append(state)
            state = engine.read(features, inputs.span(begin), state, outputs.span(begin))
    return outputs, state[..., :-1].clone(), state[..., -1].clone()


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        engine: Engine,
        features: Features,
        learning: bool,
        S: Tensor,
        z: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        starts: Tensor | None,
        log_decay: Tensor | None,
        *weights: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        states: list[Tensor] | None = [] if learning else None
        outputs, S, z = attended(engine, features, Inputs(q, k, v, starts, log_decay), S, z, states)
        ctx.engine, ctx.features, ctx.weights = engine, features, len(weights)
        ctx.save_for_backward(q, k, v, starts, log_decay, *outputs, *weights, *(states or ()))
        return outputs.y, S, z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        dy, dS, dz = gradients
        dstate = torch.cat([dS, dz[..., None]], dim=-1)
        q, k, v, starts, log_decay, y, denominators, *others = ctx.saved_tensors
        inputs, outputs = Inputs(q, k, v, starts, log_decay), Outputs(y, denominators)
        weights, states = others[: ctx.weights], others[ctx.weights :]
        decays = log_decay is not None and ctx.needs_input_grad[9]
        dlog_decay = dS.new_empty(y.shape[:3]) if decays else None
        dinputs = Inputs(torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None, dlog_decay)
        slopes = Slopes(dinputs, [torch.zeros_like(weight) for weight in weights])
        with _in_their_own_type(dS):
            for state, begin in reversed(list(zip(states, inputs.borders(), strict=True))):
                dy_span = dy[:, :, begin : begin + SPAN]
                done = Done(inputs.span(begin), outputs.span(begin), state, dy_span, dstate)
                dstate = ctx.engine.find_slopes(ctx.features, weights, done, slopes.span(begin))
        return (None, None, None, dstate[..., :-1], dstate[..., -1], *slopes.inputs, *slopes.weights)


class Mapped:
    """Features of queries and keys, and the way back to these."""

    def __init__(self, features: Features, weights: list[Tensor], q: Tensor, k: Tensor):
        with torch.enable_grad():
            self._inputs = [q.detach().requires_grad_(), k.detach().requires_grad_(), *weights]
            self._features = features.query(self._inputs[0]), features.key(self._inputs[1])
        self.fq, self.fk = (x.detach() for x in self._features)

    def back(self, dfq: Tensor, dfk: Tensor, weights: list[Tensor]) -> tuple[Tensor, Tensor]:
        """The gradients of queries and keys; those of the weights are added."""
        dq, dk, *others = torch.autograd.grad(self._features, self._inputs, (dfq, dfk), allow_unused=True)
        for total, slope in zip(weights, others, strict=True):
            if slope is not None:
                total += slope
        return dq, dk


def _in_their_own_type(like: Tensor) -> torch.autocast:
    """Products computed in the type of their factors: autocast would round the float32 sums to bfloat16."""
    return torch.autocast(like.device.type, enabled=False)
