"""The chunked scan of linear attention by torch's matrix products: all chunks of a span at once, any device and dtype.

../chunks.py has the parts that all recurrences share: splitting into chunks and decay masks.

The last entry of each v is 1, so that z is the last column of S, and the denominator is the last entry of n:

    W_ts = g_(s+1) ... g_t      P_ts = (fq_t . fk_s) W_ts
    n_t = sum_s P_ts v_s + a_t S^T fq_t                     S' = r S + sum_s u_s fk_s v_s^T

over the tokens s <= t of a chunk, S before it and S' after it. W_ts is the decay of token s at token t, u_s its decay
at the end of the chunk, a_t the decay of S at token t, and r its decay at the end of the chunk. With dx for the
gradient of x, and A_ts = (dn_t . v_s) W_ts,

    dfq_t = sum_s A_ts fk_s + a_t S dn_t                    dv_s = sum_t P_ts dn_t + u_s dS'^T fk_s
    dfk_s = sum_t A_ts fq_t + u_s dS' v_s                   dS = r dS' + sum_t a_t fq_t dn_t^T

P_ts dP_ts is a term of fq_t . dfq_t, of fk_s . dfk_s, and of the gradient of each log g between s and t. So

    dlog g_t = sum_(i >= t) (fq_i . dfq_i - fk_i . dfk_i) + <S', dS'>

With a decay for each channel, the formulas hold for each channel: a, u, r and g are vectors over the features, and W
moves into the sums over features (channel_decay.py). Only the mask of document starts remains a matrix.

N chunks, B batch, H heads, C tokens in a chunk, T time, F features, V value dim.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from lmlong.attention.chunks import (
    CHUNK_SIZE,
    ChunkedKernel,
    Decay,
    accumulate,
    add_matmul,
    decay_masks,
    from_chunks,
    masked,
    scaled,
    to_chunks,
)
from lmlong.attention.linear.channel_decay import add_keys, add_queries, channel_decay_masks, pair_products
from lmlong.attention.linear.naive import MIN_DENOMINATOR
from lmlong.attention.scan import Before, Span


class ChunkKernel(ChunkedKernel):
    """Computes a span in chunks of equal length. The last chunk is padded with zeros, which leave states unchanged."""

    normalizes = True

    def token_bytes(self, x: Span, state: Tensor) -> int:
        number, wide, features, values = x.q.element_size(), state.element_size(), state.shape[2], x.v.shape[3]
        states = features * (values + 1) // CHUNK_SIZE  # of each token's share
        by_channel = x.log_decay is not None and x.log_decay.ndim == 4
        decays = 8 * number * features if by_channel else 0
        read = number * (2 * features + values + CHUNK_SIZE) + wide * states + decays
        forward = read + number * (features + CHUNK_SIZE) + max(wide * max(features, values), number * states)
        backward = max(
            read + number * values + 2 * wide * states,
            number * (4 * features + 3 * values + 2 * CHUNK_SIZE + 2 * states) + decays,
            number * 4 * features + (number * 17 * features // 2 if by_channel else wide * 2 * features),
        )
        return max(forward, backward) + 60

    def forward(self, x: Span, state: Tensor) -> Tensor:
        fq, fk, v = _chunks(x)
        decay = self._decay(x, fq.dtype, state.dtype)
        states = self._states(fk, v, decay, state)
        weights = masked(pair_products(fq, fk, decay.pairs), decay)
        fq = scaled(fq, decay.from_state)
        z = states[:-1, ..., None, :, -1].contiguous()
        denominators = (fq * z).sum(-1)
        numerators = add_matmul(fq @ states[:-1, ..., :-1].to(fq.dtype), weights, v)
        denominators = denominators + weights.sum(-1, dtype=denominators.dtype)
        assert x.denominators is not None
        from_chunks(denominators.clamp_(min=MIN_DENOMINATOR), x.denominators)
        from_chunks(numerators / denominators[..., None], x.y)
        # cloned: a view would keep the states of all chunks alive
        return states[-1].clone()

    def backward(self, x: Span, dx: Span, state: Tensor, dstate: Tensor, dweights: list[Tensor]) -> Before:
        fq, fk, v = _chunks(x)
        decay = self._decay(x, fq.dtype, dstate.dtype)
        dn = _output_grads(x, dx, fq.dtype)
        from_queries = scaled(fq, decay.from_state).mT @ dn
        dstates = accumulate(torch.cat([from_queries, dstate[None]]), decay.chunk, self.policy, backwards=True)
        del from_queries
        states = self._states(fk, v, decay, state)
        of_states = None if dx.log_decay is None else (states[1:] * dstates[1:]).sum(-1)[..., None, :]
        S = states[:-1].to(dn.dtype)
        del states
        dstate, dS_after = dstates[0].clone(), dstates[1:].to(dn.dtype)  # cloned: a view would keep dstates alive
        del dstates
        v1 = pad(v, (0, 1), value=1)
        dfq, dfk = dn @ S.mT, v1 @ dS_after.mT
        if decay.from_state is not None and decay.to_end is not None:
            dfq.mul_(decay.from_state)
            dfk.mul_(decay.to_end)
        A = masked(dn @ v1.mT, decay)
        del S, v, v1
        add_keys(dfq, A, fk, decay.pairs)
        add_queries(dfk, A, fq, decay.pairs)
        del A
        dv = scaled(fk, decay.to_end) @ dS_after[..., :-1]
        del dS_after
        weights = masked(pair_products(fq, fk, decay.pairs), decay)
        from_chunks(add_matmul(dv, weights.mT, dn[..., :-1]), dx.v)
        by_channel = decay.pairs is not None
        del weights, dv, dn, decay
        if of_states is not None and dx.log_decay is not None:
            of_tokens = _product(fq, dfq, dstate.dtype)
            of_tokens -= _product(fk, dfk, dstate.dtype)
            if not by_channel:
                of_tokens, of_states = of_tokens.sum(-1), of_states.sum(-1)
            from_chunks(of_tokens.flip(3).cumsum_(3).flip(3).add_(of_states), dx.log_decay)
        return Before(dstate, dfq.flatten(0, 1), dfk.flatten(0, 1))

    def _decay(self, x: Span, dtype: torch.dtype, state_dtype: torch.dtype) -> Decay:
        if x.log_decay is not None and x.log_decay.ndim == 4:
            return channel_decay_masks(x, dtype, state_dtype, self.policy)
        return decay_masks(x, dtype, state_dtype, self.policy)

    def _states(self, fk: Tensor, v: Tensor, decay: Decay, S: Tensor) -> Tensor:
        """Return the states before each chunk and after the last, (N + 1, B, H, F, V + 1), given the state S before."""
        states = S.new_empty(len(v) + 1, *S.shape)
        fk = scaled(fk, decay.to_end)
        states[0] = S
        states[1:, ..., :-1] = fk.mT @ v
        states[1:, ..., -1] = fk.sum(-2, dtype=S.dtype)  # a sum in S's dtype: a matrix product would round
        return accumulate(states, decay.chunk, self.policy)


def _chunks(x: Span) -> tuple[Tensor, Tensor, Tensor]:
    """Return features and values in chunks (N, B, H, C, ...), with zeros for the keys of the padding."""
    v = to_chunks(x.v).to(x.q.dtype)
    fq, fk = x.q.unflatten(0, v.shape[:2]), x.k.unflatten(0, v.shape[:2])
    if missing := len(v) * v.shape[3] - x.v.shape[2]:
        real = fk.new_ones(len(v), 1, 1, v.shape[3], 1)
        real[-1, ..., -missing:, :] = 0
        fk = fk * real
    return fq, fk, v


def _product(x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x * y in a dtype, in the memory of x in that dtype if it is another."""
    return x * y if x.dtype == dtype else x.to(dtype).mul_(y)


def _output_grads(x: Span, dx: Span, dtype: torch.dtype) -> Tensor:
    """Return dn (N, B, H, C, V + 1). Its last entry is 0 if the denominator was clamped."""
    assert x.denominators is not None
    y, denominators = to_chunks(x.y), to_chunks(x.denominators)
    denominators = denominators.clamp(min=MIN_DENOMINATOR)  # the last chunk is padded with zeros
    dn = to_chunks(dx.y) / denominators[..., None]
    dm = (dn * y).sum(-1, keepdim=True).neg_().mul_((denominators > MIN_DENOMINATOR)[..., None])
    return torch.cat([dn, dm], dim=-1).to(dtype)
