"""The chunked scan of the delta rule by torch's matrix products: all chunks of a span at once, any device and dtype.

../chunks.py has the parts that all recurrences share: splitting into chunks and decay masks.

A token adds fk_t u_t^T to the decayed state, where u_t = b_t (v_t - a_t S_(t-1)^T fk_t) is the change of the value
stored under its key. Within a chunk, over its tokens s <= t, with S before it and S' after it, and W_ts, a_t, u_s (here
e_s) and r the decay masks of chunks.py,

    u_t + b_t sum_(s<t) W_ts (fk_t . fk_s) u_s = b_t (v_t - a_t S^T fk_t)          so (I + L) U = R, L lower triangular
    y_t = sum_(s<=t) W_ts (fq_t . fk_s) u_s + a_t S^T fq_t                         S' = r S + sum_s e_s fk_s u_s^T

The inverse of I + L is applied to b v and b a fk for all chunks at once; only the state is then computed chunk by chunk
(the WY or UT form, Yang et al. 2024). With dx for the gradient of x, and P_ts = W_ts (fq_t . fk_s),

    dU = P^T dY + e fk dS'      dR = (I + L)^-T dU      dL = -dR U^T      dS = r dS' - (b a fk)^T dR + (a fq)^T dY

and the other gradients follow from the products that define P, L and R. Each weight W_ts contributes to the gradient of
all log a between s and t, as in linear attention.

On a GPU, where each chunk would be some operations to launch, the states of all chunks follow from matrices that are
composed in a tree (`accumulate_in_tree`), and the gradients of states from their transposes:

    S' = (r I - G^T b a fk) S + G^T b v,  G = (I + L)^-T e fk

N chunks, B batch, H heads, C tokens in a chunk, F features, V value dim.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lmlong.attention.chunks import (
    CHUNK_SIZE,
    ChunkedKernel,
    Decay,
    accumulate_in_tree,
    add_matmul,
    decay_masks,
    from_chunks,
    masked,
    scaled,
    to_chunks,
)
from lmlong.attention.scan import Before, Span

PARTS = 4
"""Parts into which a GPU divides the chunks of a span: only the states are in memory for all chunks at once."""


class Chunks(NamedTuple):
    """The tokens of chunks. The last chunk is padded with zeros, which leave states unchanged. What takes memory and
    little time is computed where it is needed."""

    fq: Tensor  # (N, B, H, C, F)
    fk: Tensor  # (N, B, H, C, F)
    v: Tensor  # (N, B, H, C, V)
    beta: Tensor  # (N, B, H, C, 1)
    decay: Decay

    def P(self) -> Tensor:
        return masked(self.fq @ self.fk.mT, self.decay)

    def M(self) -> Tensor:
        """Return W_ts (fk_t . fk_s) for s < t, so that L = b M."""
        return masked(self.fk @ self.fk.mT, self.decay).tril_(-1)

    def fq_before(self) -> Tensor:
        """Return a fq."""
        return scaled(self.fq, self.decay.from_state)

    def fk_before(self) -> Tensor:
        """Return a fk."""
        return scaled(self.fk, self.decay.from_state)

    def fk_to_end(self) -> Tensor:
        """Return e fk."""
        return scaled(self.fk, self.decay.to_end)


class ChunkKernel(ChunkedKernel):
    """Computes a span in chunks of equal length."""

    def token_bytes(self, x: Span, state: Tensor) -> int:
        features, values = state.shape[2:]
        states = features * (5 * features + 4 * values + 2 * max(features, values)) // (2 * CHUNK_SIZE)
        in_parts = 2 * features * values // CHUNK_SIZE + CHUNK_SIZE + features + values
        return state.element_size() * max(4 * features + max(states, in_parts), 9 * features) + 100

    def forward(self, x: Span, state: Tensor) -> Tensor:
        if self.policy.span_bytes is None:
            c = self._chunks(x, state.dtype)
            states, changes = self._states(c, c.beta * c.M(), state)
            from_chunks(c.P() @ changes + c.fq_before() @ states[:-1], x.y)
            return states[-1].clone()  # a view would keep the states of all chunks alive
        states, transitions = self._empty_states(x, state)
        states[0] = state
        for n, part in _parts(x):
            self.fused(ChunkKernel._compose)(self, part, transitions[n], states[1:][n])
        accumulate_in_tree(states, transitions)
        for n, part in _parts(x):
            self.fused(ChunkKernel._write_outputs)(self, part, states[:-1][n])
        return states[-1].clone()

    def backward(self, x: Span, dx: Span, state: Tensor, dstate: Tensor, dweights: list[Tensor]) -> Before:
        dx = dx._replace(q=x.q.new_empty(x.q.shape), k=x.k.new_empty(x.k.shape))
        if self.policy.span_bytes is None:
            c, dy = self._chunks(x, state.dtype), to_chunks(dx.y).to(state.dtype)
            L = c.beta * c.M()
            states, changes = self._states(c, L, state)
            dstates, dR = self._state_grads(c, L, dy, dstate)
            _write_grads(c, dy, states, changes, dstates, dR, dx)
            return Before(dstates[0].clone(), dx.q, dx.k)
        states, transitions = self._empty_states(x, state)
        dstates = torch.empty_like(states)
        states[0], dstates[-1] = state, dstate
        for (n, part), (_, dpart) in zip(_parts(x), _parts(dx), strict=True):
            compose = self.fused(ChunkKernel._compose)
            compose(self, part, transitions[n], states[1:][n], dpart.y, dstates[:-1][n])
        accumulate_in_tree(states, transitions.clone())
        accumulate_in_tree(dstates, transitions.mT, backwards=True)
        del transitions
        for (n, part), (_, dpart) in zip(_parts(x), _parts(dx), strict=True):
            around = slice(n.start, n.stop + 1)
            self.fused(ChunkKernel._write_grads)(self, part, dpart, states[around], dstates[around])
        return Before(dstates[0].clone(), dx.q, dx.k)

    def _write_outputs(self, x: Span, before: Tensor) -> None:
        """Write the outputs of x, given the states before each chunk."""
        c = self._chunks(x, before.dtype)
        y = c.fq_before() @ before
        from_chunks(add_matmul(y, c.P(), _changes(c, c.beta * c.M(), before)), x.y)

    def _write_grads(self, x: Span, dx: Span, states: Tensor, dstates: Tensor) -> None:
        """Write the gradients dx, given the states before each chunk and after the last, and the gradients of both."""
        c, dy = self._chunks(x, states.dtype), to_chunks(dx.y).to(states.dtype)
        L = c.beta * c.M()
        dR = _solve(L, add_matmul(c.fk_to_end() @ dstates[1:], c.P().mT, dy), transposed=True)
        _write_grads(c, dy, states, _changes(c, L, states[:-1]), dstates, dR, dx)

    def _compose(
        self, x: Span, matrices: Tensor, added: Tensor, dy: Tensor | None = None, dadded: Tensor | None = None
    ) -> None:
        """Write the matrices that multiply the state in each chunk of x, and what is added to it; with dy, also what is
        added to its gradient."""
        c = self._chunks(x, added.dtype)
        L, before = c.beta * c.M(), c.beta * c.fk_before()
        written = _solve(L, c.fk_to_end(), transposed=True).mT  # G^T
        matrices.copy_(written @ before).neg_()
        matrices.diagonal(dim1=-2, dim2=-1).add_(1 if c.decay.chunk is None else c.decay.chunk[..., 0])
        added.copy_(written @ (c.beta * c.v))
        if dy is not None and dadded is not None:
            dy = to_chunks(dy).to(added.dtype)
            dadded.copy_(c.fq_before().mT @ dy).sub_(before.mT @ _solve(L, c.P().mT @ dy, transposed=True))

    def _states(self, c: Chunks, L: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
        """Return the states before each chunk and after the last, and the changes U."""
        solved = _solve(L, c.beta * torch.cat([c.v, -c.fk_before()], dim=-1))
        of_values, of_keys = (part.contiguous() for part in solved.split([c.v.shape[-1], c.fk.shape[-1]], dim=-1))
        return self.recurrence(S, c.decay.chunk, of_values, of_keys, c.fk_to_end(), None, backwards=False)

    def _state_grads(self, c: Chunks, L: Tensor, dy: Tensor, dS: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of the states before each chunk and after the last, and dR (N, B, H, C, V)."""
        solved = _solve(L, torch.cat([c.P().mT @ dy, c.fk_to_end()], dim=-1), transposed=True)
        of_outputs, of_state = (part.contiguous() for part in solved.split([dy.shape[-1], c.fk.shape[-1]], dim=-1))
        read, of_queries = -c.beta * c.fk_before(), c.fq_before().mT @ dy
        return self.recurrence(dS, c.decay.chunk, of_outputs, of_state, read, of_queries, backwards=True)

    def recurrence(
        self, S: Tensor, decay: Tensor | None, A: Tensor, B: Tensor, C: Tensor, E: Tensor | None, backwards: bool
    ) -> tuple[Tensor, Tensor]:
        """Return all states (N + 1, B, H, F, V) and all X (N, B, H, C, V), chunk after chunk.

        X_n = A_n + B_n S_n and S_(n+1) = r_n S_n + C_n^T X_n + E_n for the state S_n before chunk n. Backwards, for
        gradients, S_n and S_(n+1) are swapped.
        """
        steps = range(len(A))
        states, X = S.new_empty(len(A) + 1, *S.shape), torch.empty_like(A)
        states[-1 if backwards else 0] = S
        for n in reversed(steps) if backwards else steps:
            before, after = (n + 1, n) if backwards else (n, n + 1)
            X[n] = A[n] + B[n] @ states[before]
            decayed = states[before] if decay is None else states[before] * decay[n]
            added = C[n].mT @ X[n]
            states[after] = decayed + added if E is None else decayed + added + E[n]
        return states, X

    def _chunks(self, x: Span, dtype: torch.dtype) -> Chunks:
        assert x.beta is not None
        v, beta = to_chunks(x.v).to(dtype), to_chunks(x.beta).to(dtype)
        fq, fk = (part.to(dtype).unflatten(0, v.shape[:2]) for part in (x.q, x.k))
        return Chunks(fq, fk, v, beta[..., None], decay_masks(x, dtype, dtype, self.policy))

    def _empty_states(self, x: Span, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return tensors for the states (N + 1, B, H, F, V) and the transitions of chunks (N, B, H, F, F)."""
        chunks, features = len(x.q) // len(like), like.shape[2]
        return like.new_empty(chunks + 1, *like.shape), like.new_empty(chunks, *like.shape[:3], features)


def _parts(x: Span) -> Iterator[tuple[slice, Span]]:
    """Divide the chunks of a span, whose queries and keys are in chunks, into PARTS, unless they are few."""
    (rows, _, size, _), batch = x.q.shape, len(x.v)
    chunks = rows // batch
    each = chunks // PARTS if chunks >= 2 * PARTS else chunks  # never a last part of a few tokens, in a shorter chunk
    begins = [*range(0, chunks - each + 1, each)]
    for begin, end in zip(begins, [*begins[1:], chunks], strict=True):
        rows_of_part = slice(begin * batch, end * batch)
        part = x.part(begin * size, (end - begin) * size)
        yield slice(begin, end), part._replace(q=x.q[rows_of_part], k=x.k[rows_of_part])


def _changes(c: Chunks, L: Tensor, before: Tensor) -> Tensor:
    """Return the changes U, given the states before each chunk."""
    return _solve(L, c.beta * (c.v - c.fk_before() @ before))


def _write_grads(c: Chunks, dy: Tensor, states: Tensor, changes: Tensor, dstates: Tensor, dR: Tensor, dx: Span) -> None:
    """Write the gradients dx, given the states before each chunk and after the last, the changes U, and the gradients
    of both."""
    before, dafter = states[:-1], dstates[1:]
    dP = masked(dy @ changes.mT, c.decay)
    dL = (dR @ changes.mT).tril_(-1).neg_()
    dM = masked(c.beta * dL, c.decay)
    dfq = scaled(dy @ before.mT, c.decay.from_state) + dP @ c.fk
    # weights that end at a token and weights that begin there have opposite signs in the gradient of log a
    dfk_end = dM @ c.fk - scaled((c.beta * dR) @ before.mT, c.decay.from_state)
    dfk_begin = dP.mT @ c.fq + dM.mT @ c.fk + scaled(changes @ dafter.mT, c.decay.to_end)
    dx.q.copy_(dfq.flatten(0, 1))
    dx.k.copy_((dfk_end + dfk_begin).flatten(0, 1))
    from_chunks(c.beta * dR, dx.v)
    del dP, dM
    if dx.log_decay is not None:
        pairs = (c.fq * dfq + c.fk * (dfk_end - dfk_begin)).sum(-1)
        whole = (states[1:] * dafter).sum((-1, -2))
        from_chunks(pairs.flip(-1).cumsum(-1).flip(-1) + whole[..., None], dx.log_decay)
    if dx.beta is not None:
        from_chunks((dR * (c.v - c.fk_before() @ before)).sum(-1) + (dL * c.M()).sum(-1), dx.beta)


def _solve(L: Tensor, right: Tensor, transposed: bool = False) -> Tensor:
    """Return (I + L)^-1 right, or (I + L)^-T right if `transposed`, for strictly lower triangular L."""
    if transposed:
        return torch.linalg.solve_triangular(L.mT, right, upper=True, unitriangular=True)
    return torch.linalg.solve_triangular(L, right, upper=False, unitriangular=True)
