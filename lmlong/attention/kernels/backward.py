"""The causal scan, backwards: gradients of states, and from these and the states the gradients of all that was read.

Gradients of states go from the last tile to the first, states from the first to the last, so queries, which need the
states, and keys and values, which need their gradients, are two kernels. Features and weights are computed again.

R is the gradient of S, dn that of what was divided, dm that of what it was divided by. Else letters are those of
`tiles.py`.
"""

import triton
import triton.language as tl

from lmlong.attention.kernels.forward import LEAST, add_tile
from lmlong.attention.kernels.tiles import (
    TILE,
    columns,
    features,
    left_at_end,
    left_of_state,
    left_within,
    load,
    load_state,
    passed,
    product,
    slopes_before,
    store,
    store_state,
)


@triton.jit
def divided(dy, y, denominators, dy_stride, token, head, value, there, H, E):
    """dn (TILE, BLOCK_E), in the type of dy, and dm (TILE,), in float32."""
    denominator = tl.load(denominators + token * H + head, mask=there, other=1.0)
    given = load(dy, dy_stride, token, head, value, there, E)
    dn = given.to(tl.float32) / denominator[:, None]
    of_all = tl.sum(dn * load(y, H * E, token, head, value, there, E).to(tl.float32), 1)
    return dn.to(given.dtype), tl.where(denominator > LEAST, -of_all, 0.0)


@triton.jit
def add_tile_before(R, r, fq, dn, dm, total, document, whole, begun):
    """The gradient of the state before a tile."""
    seen = fq.to(tl.float32) * left_of_state(total, document)[:, None]
    kept = left_of_state(whole, begun)
    return kept * R + product(tl.trans(seen.to(dn.dtype)), dn), kept * r + tl.sum(seen * dm[:, None], 0)


@triton.jit
def sum_slopes(
    q,
    starts,
    log_decay,
    y,
    denominators,
    dy,
    slopes,
    q_stride,
    dy_stride,
    T,
    H,
    K,
    F,
    E,
    G,
    tiles,
    MAP: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """What each segment adds to the gradient of the state before it."""
    line, segment = tl.program_id(0).to(tl.int64) // G, tl.program_id(0) % G
    row, head = line // H, line % H
    column, value = columns(K, BLOCK_F, MAP), tl.arange(0, BLOCK_E)
    R, r = tl.zeros((BLOCK_F, BLOCK_E), tl.float32), tl.zeros((BLOCK_F,), tl.float32)
    for tile in range(tiles):
        time = (segment * tiles + tiles - 1 - tile) * TILE + tl.arange(0, TILE)
        token, there = row * T + time, time < T
        fq = features(load(q, q_stride, token, head, column, there, K), column, there, K, MAP)
        dn, dm = divided(dy, y, denominators, dy_stride, token, head, value, there, H, E)
        total, document, whole, begun = passed(starts, log_decay, token, head, there, H)
        R, r = add_tile_before(R, r, fq, dn, dm, total, document, whole, begun)
    store_state(slopes, R, r, line, segment, G + 1, F, E, BLOCK_F, BLOCK_E)


@triton.jit
def slopes_of_queries(
    q,
    k,
    v,
    starts,
    log_decay,
    states,
    y,
    denominators,
    dy,
    dq,
    pairs,
    q_stride,
    k_stride,
    v_stride,
    dy_stride,
    T,
    H,
    K,
    F,
    E,
    G,
    tiles,
    MAP: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """dq, and for the gradient of the log decays the products fq . dfq, if they are asked for."""
    line, segment = tl.program_id(0).to(tl.int64) // G, tl.program_id(0) % G
    row, head = line // H, line % H
    column, value = columns(K, BLOCK_F, MAP), tl.arange(0, BLOCK_E)
    S, z = load_state(states, line, segment, G + 1, F, E, BLOCK_F, BLOCK_E)
    for tile in range(tiles):
        time = (segment * tiles + tile) * TILE + tl.arange(0, TILE)
        token, there = row * T + time, time < T
        query = load(q, q_stride, token, head, column, there, K)
        fk = features(load(k, k_stride, token, head, column, there, K), column, there, K, MAP)
        x = load(v, v_stride, token, head, value, there, E)
        dn, dm = divided(dy, y, denominators, dy_stride, token, head, value, there, H, E)
        total, document, whole, begun = passed(starts, log_decay, token, head, there, H)
        A = (product(dn, tl.trans(x)) + dm[:, None]) * left_within(total, document, starts, log_decay)
        of_state = product(dn, tl.trans(S).to(x.dtype)) + dm[:, None] * z[None, :]
        dfq = product(A.to(x.dtype), fk) + left_of_state(total, document)[:, None] * of_state
        store(dq, slopes_before(query, dfq, MAP), H * K, token, head, column, there, K)
        if pairs is not None:
            fq = features(query, column, there, K, MAP)
            tl.store(pairs + token * H + head, tl.sum(fq.to(tl.float32) * dfq, 1), mask=there)
        S, z = add_tile(S, z, fk, x, total, document, whole, begun)


@triton.jit
def slopes_of_keys(
    q,
    k,
    v,
    starts,
    log_decay,
    states,
    slopes,
    y,
    denominators,
    dy,
    dk,
    dv,
    pairs,
    q_stride,
    k_stride,
    v_stride,
    dy_stride,
    T,
    H,
    K,
    F,
    E,
    G,
    tiles,
    MAP: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """dk and dv; the products of `slopes_of_queries` become the gradient of the log decays."""
    line, segment = tl.program_id(0).to(tl.int64) // G, tl.program_id(0) % G
    row, head = line // H, line % H
    column, value = columns(K, BLOCK_F, MAP), tl.arange(0, BLOCK_E)
    R, r = load_state(slopes, line, segment + 1, G + 1, F, E, BLOCK_F, BLOCK_E)
    S, z = load_state(states, line, segment + 1, G + 1, F, E, BLOCK_F, BLOCK_E)
    later = tl.sum(S * R) + tl.sum(z * r)
    for tile in range(tiles):
        time = (segment * tiles + tiles - 1 - tile) * TILE + tl.arange(0, TILE)
        token, there = row * T + time, time < T
        key = load(k, k_stride, token, head, column, there, K)
        fk = features(key, column, there, K, MAP)
        fq = features(load(q, q_stride, token, head, column, there, K), column, there, K, MAP)
        x = load(v, v_stride, token, head, value, there, E)
        dn, dm = divided(dy, y, denominators, dy_stride, token, head, value, there, H, E)
        total, document, whole, begun = passed(starts, log_decay, token, head, there, H)
        within = left_within(total, document, starts, log_decay)
        left = left_at_end(total, document, whole, begun)[:, None]
        A = (product(dn, tl.trans(x)) + dm[:, None]) * within
        weights = product(fq, tl.trans(fk)) * within
        of_state = product(x, tl.trans(R).to(x.dtype)) + r[None, :]
        dfk = product(tl.trans(A).to(x.dtype), fq) + left * of_state
        dx = product(tl.trans(weights).to(x.dtype), dn) + left * product(fk, R.to(x.dtype))
        store(dk, slopes_before(key, dfk, MAP), H * K, token, head, column, there, K)
        store(dv, dx, H * E, token, head, value, there, E)
        if pairs is not None:
            pair = tl.load(pairs + token * H + head, mask=there, other=0.0) - tl.sum(fk.to(tl.float32) * dfk, 1)
            tl.store(pairs + token * H + head, later + tl.cumsum(pair, 0, reverse=True), mask=there)
            later += tl.sum(pair, 0)
        R, r = add_tile_before(R, r, fq, dn, dm, total, document, whole, begun)
