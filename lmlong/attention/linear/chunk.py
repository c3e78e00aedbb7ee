"""The linear attention scan in chunks, by torch's matrix products: all chunks of a span at once, on any device, in any
dtype.

Each v has 1 as its last entry, so that z is the last column of S, and the denominator the last entry of n:

    W_ts = g_(s+1) ... g_t      P_ts = (fq_t . fk_s) W_ts
    n_t = sum_s P_ts v_s + a_t S^T fq_t                     S' = r S + sum_s u_s fk_s v_s^T

over the tokens s <= t of a chunk, S before it and S' after it. The decay mask W_ts is the decay of token s at token t,
a_t that of S at token t and r at the end of the chunk, and u_s that of token s there. With dx for the gradient of x,
and A_ts = (dn_t . v_s) W_ts,

    dfq_t = sum_s A_ts fk_s + a_t S dn_t                    dv_s = sum_t P_ts dn_t + u_s dS'^T fk_s
    dfk_s = sum_t A_ts fq_t + u_s dS' v_s                   dS = r dS' + sum_t a_t fq_t dn_t^T

P_ts dP_ts is a part of fq_t . dfq_t and of fk_s . dfk_s alike, and of the gradient of each log g between s and t. So

    dlog g_t = sum_(i >= t) (fq_i . dfq_i - fk_i . dfk_i) + <S', dS'>

With a decay for each channel all this holds channel by channel: a, u, r and g are vectors over the features, and W is
within the sums over them (channel_decay.py), where document starts alone are a matrix.

N chunks, B batch, H heads, C tokens in a chunk, T time, F features, V value dim.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from lmlong.attention.chunks import Decay, add_matmul, decay_masks, flat_chunks, from_chunks, masked, to_chunks
from lmlong.attention.linear import autograd
from lmlong.attention.linear.autograd import MIN_DENOMINATOR, Scan
from lmlong.attention.linear.channel_decay import add_keys, add_queries, channel_decay_masks, pair_products
from lmlong.attention.scan import FeatureVjp, QKFeatures, SavedSpan, ScanGrads, ScanInputs, ScanOutputs


class Chunks(NamedTuple):
    """The tokens of a span; the last chunk is padded with zeros, which add nothing to any state."""

    fq: Tensor  # (N, B, H, C, F)
    fk: Tensor  # (N, B, H, C, F)
    v: Tensor  # (N, B, H, C, V)


class ChunkGrads(NamedTuple):
    """The gradients of a span."""

    fq: Tensor  # (N, B, H, C, F)
    fk: Tensor  # (N, B, H, C, F)
    v: Tensor  # (N, B, H, C, V)
    log_decay: Tensor | None  # (N, B, H, C), or (N, B, H, C, F)
    S: Tensor  # (B, H, F, V + 1)


class ChunkKernel:
    """A span in chunks of equal length."""

    has_denominators = True

    def forward(self, features: QKFeatures, inputs: ScanInputs, state: Tensor, out: ScanOutputs) -> Tensor:
        fq, fk = features.query(flat_chunks(inputs.q)), features.key(flat_chunks(inputs.k))
        x = _feature_chunks(fq, fk, inputs)
        decay = _decay(inputs, fq.dtype, state.dtype)
        states = chunk_states(x, decay, state)
        numerators, denominators = chunk_outputs(x, decay, states)
        assert out.denominators is not None
        from_chunks(denominators.clamp_(min=MIN_DENOMINATOR), out.denominators)
        from_chunks(numerators / denominators[..., None], out.y)
        # cloned: a view would keep the states of all chunks alive
        return states[-1].clone()

    def backward(self, features: QKFeatures, weights: list[Tensor], saved: SavedSpan, out: ScanGrads) -> Tensor:
        inputs, outputs, state, dy, dstate = saved
        vjp = FeatureVjp(features, weights, flat_chunks(inputs.q), flat_chunks(inputs.k))
        x = _feature_chunks(vjp.fq, vjp.fk, inputs)
        decay = _decay(inputs, vjp.fq.dtype, dstate.dtype)
        states = chunk_states(x, decay, state)
        assert outputs.denominators is not None
        y, denominators = to_chunks(outputs.y), to_chunks(outputs.denominators)
        denominators = denominators.clamp(min=MIN_DENOMINATOR)  # the last chunk is padded with zeros
        dn = to_chunks(dy) / denominators[..., None]
        dm = (dn * y).sum(-1, keepdim=True).neg_().mul_((denominators > MIN_DENOMINATOR)[..., None])
        dn = torch.cat([dn, dm], dim=-1).to(x.fq.dtype)
        grads = chunk_grads(x, decay, states, dn, dstate, out.inputs.log_decay is not None)
        dq, dk = vjp.backward(grads.fq.flatten(0, 1), grads.fk.flatten(0, 1), out.weights)
        shape = x.v.shape[:2]
        dinputs = (dq.unflatten(0, shape), dk.unflatten(0, shape), grads.v, None, grads.log_decay, None)
        for into, grad in zip(out.inputs, dinputs, strict=True):
            if into is not None and grad is not None:
                from_chunks(grad, into)
        return grads.S


scan: Scan = partial(autograd.scan, ChunkKernel())


def chunk_states(x: Chunks, decay: Decay, S: Tensor) -> Tensor:
    """Return the states before each chunk and after the last, (N + 1, B, H, F, V + 1), given the first."""
    states = S.new_empty(len(x.v) + 1, *S.shape)
    fk = x.fk if decay.to_end is None else x.fk * decay.to_end
    states[0] = S
    states[1:, ..., :-1] = fk.mT @ x.v
    states[1:, ..., -1] = fk.sum(-2, dtype=S.dtype)  # summed exactly, where products would round
    return _accumulate(states, decay.chunk)


def chunk_outputs(x: Chunks, decay: Decay, states: Tensor) -> tuple[Tensor, Tensor]:
    """Return numerators (N, B, H, C, V) and denominators (N, B, H, C)."""
    fq = x.fq if decay.from_state is None else x.fq * decay.from_state
    S, z = states[:-1, ..., :-1].to(fq.dtype), states[:-1, ..., None, :, -1].contiguous()
    weights = masked(pair_products(x.fq, x.fk, decay.pairs), decay)
    denominators = (fq * z).sum(-1)
    return add_matmul(fq @ S, weights, x.v), denominators + weights.sum(-1, dtype=denominators.dtype)


def chunk_grads(x: Chunks, decay: Decay, states: Tensor, dn: Tensor, dS: Tensor, decays: bool) -> ChunkGrads:
    """Return the gradients of a span, from those of its outputs, dn (N, B, H, C, V + 1), and of the state after it."""
    v = pad(x.v, (0, 1), value=1)
    fq, fk = x.fq, x.fk
    if decay.from_state is not None and decay.to_end is not None:
        fq, fk = fq * decay.from_state, fk * decay.to_end
    dstates = _accumulate(torch.cat([fq.mT @ dn, dS[None]]), decay.chunk, backwards=True)
    dS_after = dstates[1:].to(dn.dtype)
    dfq, dfk = dn @ states[:-1].to(dn.dtype).mT, v @ dS_after.mT
    if decay.from_state is not None and decay.to_end is not None:
        dfq, dfk = dfq.mul_(decay.from_state), dfk.mul_(decay.to_end)
    A = masked(dn @ v.mT, decay)
    dfq, dfk = add_keys(dfq, A, x.fk, decay.pairs), add_queries(dfk, A, x.fq, decay.pairs)
    weights = masked(pair_products(x.fq, x.fk, decay.pairs), decay)
    dv = add_matmul(fk @ dS_after[..., :-1], weights.mT, dn[..., :-1])
    dlog_decay = None
    if decays:
        of_tokens = x.fq.to(dS.dtype) * dfq - x.fk.to(dS.dtype) * dfk
        of_states = (states[1:] * dstates[1:]).sum(-1)[..., None, :]
        if decay.pairs is None:
            of_tokens, of_states = of_tokens.sum(-1), of_states.sum(-1)
        dlog_decay = of_tokens.flip(3).cumsum(3).flip(3) + of_states
    return ChunkGrads(dfq, dfk, dv, dlog_decay, dstates[0])


def _decay(inputs: ScanInputs, dtype: torch.dtype, state_dtype: torch.dtype) -> Decay:
    if inputs.log_decay is not None and inputs.log_decay.ndim == 4:
        return channel_decay_masks(inputs.document_starts, inputs.log_decay, dtype, state_dtype)
    return decay_masks(inputs.document_starts, inputs.log_decay, dtype, state_dtype)


def _feature_chunks(fq: Tensor, fk: Tensor, inputs: ScanInputs) -> Chunks:
    """Return the chunks of features (N B, H, C, F), with zeros for the padding of the last one."""
    v = to_chunks(inputs.v).to(fq.dtype)
    fq, fk = fq.unflatten(0, v.shape[:2]), fk.unflatten(0, v.shape[:2])
    if missing := len(v) * v.shape[3] - inputs.v.shape[2]:
        real = fk.new_ones(len(v), 1, 1, v.shape[3], 1)
        real[-1, ..., -missing:, :] = 0
        fk = fk * real
    return Chunks(fq, fk, v)


def _accumulate(states: Tensor, decay: Tensor | None, backwards: bool = False) -> Tensor:
    """Add to each state the decayed one before it, or after it when going backwards."""
    each = states.unbind()
    steps = range(len(each) - 1)
    for n in reversed(steps) if backwards else steps:
        into, source = (each[n], each[n + 1]) if backwards else (each[n + 1], each[n])
        into.add_(source if decay is None else source * decay[n])
    return states
