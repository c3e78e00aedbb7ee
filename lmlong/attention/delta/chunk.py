"""The delta rule in chunks, by torch's matrix products: all chunks of a span at once, on any device, in any dtype.

A token adds fk_t u_t^T to the decayed state, where u_t = b_t (v_t - a_t S_(t-1)^T fk_t) is the change of what its key
has stored. Within a chunk, over its tokens s <= t, with S before it and S' after it, and W_ts, a_t, u_s (here e_s) and
r the decay masks of chunks.py,

    u_t + b_t sum_(s<t) W_ts (fk_t . fk_s) u_s = b_t (v_t - a_t S^T fk_t)          so (I + L) U = R, L lower triangular
    y_t = sum_(s<=t) W_ts (fq_t . fk_s) u_s + a_t S^T fq_t                         S' = r S + sum_s e_s fk_s u_s^T

The inverse of I + L is applied to b v and b a fk for all chunks at once; then each chunk waits only for the state
before it (the WY or UT form, Yang et al. 2024). With dx for the gradient of x, and P_ts = W_ts (fq_t . fk_s),

    dU = P^T dY + e fk dS'      dR = (I + L)^-T dU      dL = -dR U^T      dS = r dS' - (b a fk)^T dR + (a fq)^T dY

and the rest follows from the products that P, L and R are. Each weight W_ts is in the gradient of all log a between s
and t, as in linear attention.

N chunks, B batch, H heads, C tokens in a chunk, F features, V value dim.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lmlong.attention import scan as spans
from lmlong.attention.chunks import Decay, decay_masks, flat_chunks, from_chunks, masked, to_chunks
from lmlong.attention.scan import FeatureVjp, QKFeatures, SavedSpan, ScanGrads, ScanInputs, ScanOutputs


class Chunks(NamedTuple):
    """The tokens of a span; the last chunk is padded with zeros, which change no state."""

    fq: Tensor  # (N, B, H, C, F)
    fk: Tensor  # (N, B, H, C, F)
    v: Tensor  # (N, B, H, C, V)
    beta: Tensor  # (N, B, H, C, 1)


class Masked(NamedTuple):
    """What the decay masks make of a chunk's tokens."""

    P: Tensor  # (N, B, H, C, C)
    M: Tensor  # (N, B, H, C, C) W_ts (fk_t . fk_s) of s < t, so that L = b M
    fq: Tensor  # a fq, as it reads the state before
    fk: Tensor  # a fk
    fk_to_end: Tensor  # e fk
    chunk: Tensor | None  # r (N, B or 1, H or 1, 1, 1)


class ChunkGrads(NamedTuple):
    """The gradients of a span."""

    fq: Tensor  # (N, B, H, C, F)
    fk: Tensor  # (N, B, H, C, F)
    v: Tensor  # (N, B, H, C, V)
    beta: Tensor  # (N, B, H, C)
    log_decay: Tensor  # (N, B, H, C)


class ChunkRecurrence(Protocol):
    """What waits, chunk after chunk, for the state S_n before it; all else is computed for all chunks at once.

    X_n = A_n + B_n S_n and S_(n+1) = r_n S_n + C_n^T X_n + E_n; going backwards, of gradients, S_n and S_(n+1) change
    their places. Returns all states (N + 1, B, H, F, V), in the order of time, and all X (N, B, H, C, V).
    """

    def __call__(
        self, S: Tensor, decay: Tensor | None, A: Tensor, B: Tensor, C: Tensor, E: Tensor | None, backwards: bool
    ) -> tuple[Tensor, Tensor]: ...


def recurrence(
    S: Tensor, decay: Tensor | None, A: Tensor, B: Tensor, C: Tensor, E: Tensor | None, backwards: bool
) -> tuple[Tensor, Tensor]:
    """Run the recurrence by torch."""
    steps = range(len(A))
    states, X = S.new_empty(len(A) + 1, *S.shape), torch.empty_like(A)
    states[-1 if backwards else 0] = S
    for n in reversed(steps) if backwards else steps:
        before, after = (n + 1, n) if backwards else (n, n + 1)
        X[n] = A[n] + B[n] @ states[before]
        kept = states[before] if decay is None else states[before] * decay[n]
        added = C[n].mT @ X[n]
        states[after] = kept + added if E is None else kept + added + E[n]
    return states, X


class ChunkKernel:
    """A span in chunks of equal length."""

    has_denominators = False

    def __init__(self, recurrence: ChunkRecurrence = recurrence):
        self._recurrence = recurrence

    def forward(self, features: QKFeatures, inputs: ScanInputs, state: Tensor, out: ScanOutputs) -> Tensor:
        fq, fk = features.query(flat_chunks(inputs.q)), features.key(flat_chunks(inputs.k))
        x = _chunks(fq, fk, inputs, state.dtype)
        of_chunk = _masked(x, decay_masks(inputs.document_starts, inputs.log_decay, state.dtype, state.dtype))
        states, changes = self._states(x, of_chunk, state)
        from_chunks(of_chunk.P @ changes + of_chunk.fq @ states[:-1], out.y)
        return states[-1].clone()  # a view would keep the states of all chunks alive

    def backward(self, features: QKFeatures, weights: list[Tensor], saved: SavedSpan, out: ScanGrads) -> Tensor:
        inputs, _, state, dy, dstate = saved
        vjp = FeatureVjp(features, weights, flat_chunks(inputs.q), flat_chunks(inputs.k))
        x = _chunks(vjp.fq, vjp.fk, inputs, state.dtype)
        decay = decay_masks(inputs.document_starts, inputs.log_decay, state.dtype, state.dtype)
        grads, dstate = self._grads(x, decay, state, to_chunks(dy).to(state.dtype), dstate)
        dq, dk = (dx.flatten(0, 1).to(f.dtype) for dx, f in ((grads.fq, vjp.fq), (grads.fk, vjp.fk)))
        dq, dk = (dx.unflatten(0, x.v.shape[:2]) for dx in vjp.backward(dq, dk, out.weights))
        dinputs = ScanInputs(dq, dk, grads.v, None, grads.log_decay, grads.beta)
        for into, grad in zip(out.inputs, dinputs, strict=True):
            if into is not None and grad is not None:
                from_chunks(grad, into)
        return dstate

    def _states(self, x: Chunks, of_chunk: Masked, S: Tensor) -> tuple[Tensor, Tensor]:
        """Return the states before each chunk and after the last, and the changes U."""
        solved = _solve(x.beta * of_chunk.M, x.beta * torch.cat([x.v, -of_chunk.fk], dim=-1))
        of_values, of_keys = (part.contiguous() for part in solved.split([x.v.shape[-1], x.fk.shape[-1]], dim=-1))
        return self._recurrence(S, of_chunk.chunk, of_values, of_keys, of_chunk.fk_to_end, None, backwards=False)

    def _state_grads(self, x: Chunks, of_chunk: Masked, dy: Tensor, dS: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of the states before each chunk and after the last, and dR (N, B, H, C, V)."""
        right = torch.cat([of_chunk.P.mT @ dy, of_chunk.fk_to_end], dim=-1)
        solved = _solve(x.beta * of_chunk.M, right, transposed=True)
        of_outputs, of_state = (part.contiguous() for part in solved.split([dy.shape[-1], x.fk.shape[-1]], dim=-1))
        read, of_queries = -x.beta * of_chunk.fk, of_chunk.fq.mT @ dy
        return self._recurrence(dS, of_chunk.chunk, of_outputs, of_state, read, of_queries, backwards=True)

    def _grads(self, x: Chunks, decay: Decay, S: Tensor, dy: Tensor, dS: Tensor) -> tuple[ChunkGrads, Tensor]:
        """Return the gradients of a span from those of its outputs and of the state after; and of the state before."""
        of_chunk = _masked(x, decay)
        states, changes = self._states(x, of_chunk, S)
        dstates, dR = self._state_grads(x, of_chunk, dy, dS)
        before, dafter = states[:-1], dstates[1:]
        dP = masked(dy @ changes.mT, decay)
        dL = (dR @ changes.mT).tril_(-1).neg_()
        dM = masked(x.beta * dL, decay)
        dfq = _scaled(dy @ before.mT, decay.from_state) + dP @ x.fk
        # of log a, a weight that ends at a token has one sign, and one that begins there the other
        dfk_end = dM @ x.fk - _scaled((x.beta * dR) @ before.mT, decay.from_state)
        dfk_begin = dP.mT @ x.fq + dM.mT @ x.fk + _scaled(changes @ dafter.mT, decay.to_end)
        pairs = (x.fq * dfq + x.fk * (dfk_end - dfk_begin)).sum(-1)
        whole = (states[1:] * dafter).sum((-1, -2))
        dlog_decay = pairs.flip(-1).cumsum(-1).flip(-1) + whole[..., None]
        dbeta = (dR * (x.v - of_chunk.fk @ before)).sum(-1) + (dL * of_chunk.M).sum(-1)
        return ChunkGrads(dfq, dfk_end + dfk_begin, x.beta * dR, dbeta, dlog_decay), dstates[0].clone()


def _chunks(fq: Tensor, fk: Tensor, inputs: ScanInputs, dtype: torch.dtype) -> Chunks:
    assert inputs.beta is not None
    v = to_chunks(inputs.v).to(dtype)
    fq, fk = (x.to(dtype).unflatten(0, v.shape[:2]) for x in (fq, fk))
    return Chunks(fq, fk, v, to_chunks(inputs.beta).to(dtype)[..., None])


def _masked(x: Chunks, decay: Decay) -> Masked:
    return Masked(
        masked(x.fq @ x.fk.mT, decay),
        masked(x.fk @ x.fk.mT, decay).tril_(-1),
        _scaled(x.fq, decay.from_state),
        _scaled(x.fk, decay.from_state),
        _scaled(x.fk, decay.to_end),
        decay.chunk,
    )


def _solve(L: Tensor, right: Tensor, transposed: bool = False) -> Tensor:
    """Return (I + L)^-1 right, or by the transpose, for strictly lower triangular L."""
    if transposed:
        return torch.linalg.solve_triangular(L.mT, right, upper=True, unitriangular=True)
    return torch.linalg.solve_triangular(L, right, upper=False, unitriangular=True)


def _scaled(x: Tensor, by: Tensor | None) -> Tensor:
    return x if by is None else x * by


Scan = Callable[[QKFeatures, ScanInputs, Tensor], tuple[Tensor, Tensor]]
"""The scan of one implementation: (features, inputs, S) -> outputs and S."""

scan: Scan = partial(spans.scan, ChunkKernel())
