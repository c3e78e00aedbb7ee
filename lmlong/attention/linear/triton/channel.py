"""The recurrence of linear attention with a decay for each channel, token by token, forwards and backwards.

Each channel has its own decay, so decays are not factors of a matrix product. A program keeps the state of one head of
one row in registers and goes through its tokens. Features (B, H, T, F) and all tensors over tokens are contiguous. dx
is the gradient of x; n and m are the numerators and denominators of outputs.
"""

import triton
import triton.language as tl

from lmlong.attention.linear.triton.forward import MIN_DENOMINATOR


@triton.jit
def load_state(states, line, index, count, F, V, BLOCK_F: tl.constexpr, BLOCK_V: tl.constexpr):
    """Load S (BLOCK_F, BLOCK_V) and z (BLOCK_F,) from states (B H, count, F, V + 1)."""
    feature, value = tl.arange(0, BLOCK_F), tl.arange(0, BLOCK_V)
    rows = states + (line * count + index) * F * (V + 1) + feature * (V + 1)
    valid = feature < F
    S = tl.load(rows[:, None] + value[None, :], mask=valid[:, None] & (value < V)[None, :], other=0.0)
    return S, tl.load(rows + V, mask=valid, other=0.0)


@triton.jit
def store_state(states, S, z, line, index, count, F, V, BLOCK_F: tl.constexpr, BLOCK_V: tl.constexpr):
    """Store what `load_state` loads."""
    feature, value = tl.arange(0, BLOCK_F), tl.arange(0, BLOCK_V)
    rows = states + (line * count + index) * F * (V + 1) + feature * (V + 1)
    valid = feature < F
    tl.store(rows[:, None] + value[None, :], S, mask=valid[:, None] & (value < V)[None, :])
    tl.store(rows + V, z, mask=valid)


@triton.jit
def load_vector(x, token, columns, WIDTH):
    """Load the vector of a token in float32; 0 for padded columns."""
    return tl.load(x + token * WIDTH + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)


@triton.jit
def load_gate(log_decay, document_starts, token, start, columns, F):
    """Load the decay of each channel at a token; 0 at a document start."""
    gate = tl.exp(load_vector(log_decay, token, columns, F))
    if document_starts is not None:
        gate = tl.where(tl.load(document_starts + start) != 0, 0.0, gate)
    return gate


@triton.jit
def decayed(x, gate):
    """Return x times its gate; 0 for a gate of 0, even if x is not finite."""
    return tl.where(gate > 0, x * gate, 0.0)


@triton.jit
def load_output_grads(dy, y, denominators, token, values, V):
    """Load dn and dm; dm is 0 if m was clamped."""
    denominator = tl.load(denominators + token)
    dn = load_vector(dy, token, values, V) / denominator
    dm = -tl.sum(dn * load_vector(y, token, values, V), 0)
    return dn, tl.where(denominator > MIN_DENOMINATOR, dm, 0.0)


@triton.jit
def recurrence(
    fq,
    fk,
    v,
    document_starts,
    log_decay,
    before,
    after,
    y,
    denominators,
    dy,
    dfq,
    T,
    H,
    F,
    V,
    BLOCK_F: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Store the outputs, their denominators and the state after; with `dy`, store the gradients of queries instead."""
    line = tl.program_id(0).to(tl.int64)
    features, values = tl.arange(0, BLOCK_F), tl.arange(0, BLOCK_V)
    S, z = load_state(before, line, 0, 1, F, V, BLOCK_F, BLOCK_V)
    for t in range(T):
        token, start = line * T + t, line // H * T + t
        gate = load_gate(log_decay, document_starts, token, start, features, F)
        key, query = load_vector(fk, token, features, F), load_vector(fq, token, features, F)
        S = decayed(S, gate[:, None]) + key[:, None] * load_vector(v, token, values, V)[None, :]
        z = decayed(z, gate) + key
        if dy is None:
            denominator = tl.sum(query * z, 0)
            denominator = tl.where(denominator < MIN_DENOMINATOR, MIN_DENOMINATOR, denominator)
            numerator = tl.sum(query[:, None] * S, 0)
            tl.store(y + token * V + values, numerator / denominator, mask=values < V)
            tl.store(denominators + token, denominator)
        else:
            dn, dm = load_output_grads(dy, y, denominators, token, values, V)
            tl.store(dfq + token * F + features, tl.sum(S * dn[None, :], 1) + z * dm, mask=features < F)
    store_state(after, S, z, line, 0, 1, F, V, BLOCK_F, BLOCK_V)


@triton.jit
def recurrence_backwards(
    fq,
    fk,
    v,
    document_starts,
    log_decay,
    dafter,
    dbefore,
    y,
    denominators,
    dy,
    dfk,
    dv,
    T,
    H,
    F,
    V,
    BLOCK_F: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Store the gradients of keys, values and the state before, from the last token to the first."""
    line = tl.program_id(0).to(tl.int64)
    features, values = tl.arange(0, BLOCK_F), tl.arange(0, BLOCK_V)
    dS, dz = load_state(dafter, line, 0, 1, F, V, BLOCK_F, BLOCK_V)
    for step in range(T):
        token, start = line * T + T - 1 - step, line // H * T + T - 1 - step
        dn, dm = load_output_grads(dy, y, denominators, token, values, V)
        query, key = load_vector(fq, token, features, F), load_vector(fk, token, features, F)
        dS += query[:, None] * dn[None, :]
        dz += query * dm
        of_key = tl.sum(dS * load_vector(v, token, values, V)[None, :], 1) + dz
        tl.store(dfk + token * F + features, of_key, mask=features < F)
        tl.store(dv + token * V + values, tl.sum(dS * key[:, None], 0), mask=values < V)
        gate = load_gate(log_decay, document_starts, token, start, features, F)
        dS, dz = decayed(dS, gate[:, None]), decayed(dz, gate)
    store_state(dbefore, dS, dz, line, 0, 1, F, V, BLOCK_F, BLOCK_V)
