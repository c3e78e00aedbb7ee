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

from lmlong.attention.chunks import Chunks, find_borders, find_reach, find_slopes, in_chunks, put, read

SPAN = 512
"""Tokens whose chunks are worked on at once, so that temporaries stay in cache."""

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
    S: Tensor  # (B, H, F, E), after the last token
    z: Tensor  # (B, H, F)


@torch.compiler.disable  # its loop over spans would be unrolled, to no gain
def attend(features: Features, inputs: Inputs, S: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs (B, H, T, E), and the state after the last token."""
    return _Attend.apply(features, torch.is_grad_enabled(), S, z, *inputs, *features.parameters())


@torch.no_grad()
def attended(features: Features, inputs: Inputs, S: Tensor, z: Tensor, kept: list[Tensor] | None = None) -> Outputs:
    """Outputs and what they were divided by; the states before each span are kept in the list, if one is given."""
    y, denominators = torch.empty_like(inputs.v), S.new_empty(inputs.q.shape[:3])
    state = torch.cat([S, z[..., None]], dim=-1)
    with _in_their_own_type(S):
        for begin in inputs.borders():
            if kept is not None:
                kept.append(state)
            part = inputs.span(begin)
            fq, fk = _features(features, in_chunks(part.q), in_chunks(part.k), part.q.shape[2])
            x = Chunks(fq, fk, in_chunks(part.v).to(fq.dtype))
            reach = find_reach(part.starts, part.log_decay, fq.dtype, S.dtype)
            borders = find_borders(x, reach, state)
            numerator, denominator = read(x, reach, borders)
            put(denominators[:, :, begin : begin + SPAN], denominator.clamp_(min=SMALLEST))
            put(y[:, :, begin : begin + SPAN], numerator / denominator[..., None])
            # cloned, for a view would keep the states of all chunks alive
            state = borders[-1].clone()
    return Outputs(y, denominators, state[..., :-1].clone(), state[..., -1].clone())


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
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
        out = attended(features, Inputs(q, k, v, starts, log_decay), S, z, states)
        ctx.features, ctx.weights = features, len(weights)
        ctx.save_for_backward(q, k, v, starts, log_decay, out.y, out.denominators, *weights, *(states or ()))
        return out.y, out.S, out.z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        dy, dS, dz = gradients
        dS = torch.cat([dS, dz[..., None]], dim=-1)
        q, k, v, starts, log_decay, y, denominators, *others = ctx.saved_tensors
        inputs, weights, states = Inputs(q, k, v, starts, log_decay), others[: ctx.weights], others[ctx.weights :]
        decays = log_decay is not None and ctx.needs_input_grad[8]
        log_decay_slopes = dS.new_empty(y.shape[:3]) if decays else None
        slopes = Inputs(torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None, log_decay_slopes)
        sums = [torch.zeros_like(weight) for weight in weights]
        with _in_their_own_type(dS):
            for number, begin in reversed(list(enumerate(inputs.borders()))):
                span = slice(begin, begin + SPAN)
                kept = inputs.span(begin), (y[:, :, span], denominators[:, :, span]), states[number]
                into = slopes.span(begin), sums
                dS = _backward_span(ctx.features, weights, *kept, (dy[:, :, span], dS), *into)
        return (None, None, dS[..., :-1], dS[..., -1], *slopes, *sums)


def _backward_span(
    features: Features,
    weights: list[Tensor],
    inputs: Inputs,
    outputs: tuple[Tensor, Tensor],
    state: Tensor,
    gradients: tuple[Tensor, Tensor],
    slopes: Inputs,
    sums: list[Tensor],
) -> Tensor:
    """Write the gradients of a span's inputs and add those of the weights; returns that of the state before it."""
    dy, dS = gradients
    with torch.enable_grad():
        q, k = (in_chunks(x).detach().requires_grad_() for x in (inputs.q, inputs.k))
        fq, fk = _features(features, q, k, inputs.q.shape[2])
    x = Chunks(fq.detach(), fk.detach(), in_chunks(inputs.v).to(fq.dtype))
    reach = find_reach(inputs.starts, inputs.log_decay, fq.dtype, dS.dtype)
    borders = find_borders(x, reach, state)
    y, m = map(in_chunks, outputs)
    m = m.clamp(min=SMALLEST)  # the last chunk is filled up with zeros
    dn = in_chunks(dy) / m[..., None]
    dm = (dn * y).sum(-1, keepdim=True).neg_().mul_((m > SMALLEST)[..., None])
    dn = torch.cat([dn, dm], dim=-1).to(fq.dtype)
    found = find_slopes(x, reach, borders, dn, dS, slopes.log_decay is not None)
    dq, dk, *others = torch.autograd.grad((fq, fk), (q, k, *weights), (found.fq, found.fk), allow_unused=True)
    for into, slope in zip(slopes, (dq, dk, found.v, None, found.log_decay), strict=True):
        if into is not None and slope is not None:
            put(into, slope)
    for total, gradient in zip(sums, others, strict=True):
        if gradient is not None:
            total += gradient
    return found.S


def _features(features: Features, q: Tensor, k: Tensor, time: int) -> tuple[Tensor, Tensor]:
    """Of chunks (N, B, H, C, ...); none for what the last one is filled up with."""
    fq, fk = features.query(q.flatten(0, 1)), features.key(k.flatten(0, 1))
    if missing := len(k) * k.shape[3] - time:
        real = fk.new_ones(len(k), k.shape[3])
        real[-1, -missing:] = 0
        fk = fk * real.repeat_interleave(k.shape[1], 0)[:, None, :, None]
    return fq.unflatten(0, q.shape[:2]), fk.unflatten(0, k.shape[:2])


def _in_their_own_type(like: Tensor) -> torch.autocast:
    """Products computed in the type of their factors: autocast would round the float32 sums to bfloat16."""
    return torch.autocast(like.device.type, enabled=False)
