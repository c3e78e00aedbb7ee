"""The causal scan, forwards: states of segments, the states between them, and from these the outputs.

Each program works through one segment of one head of one row, tile by tile; so many rows, heads and segments there
are, so much of the chip is at work. Letters are those of `tiles.py`.
"""

import triton
import triton.language as tl

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
    store,
    store_state,
)
from lmlong.attention.spans import SMALLEST

LEAST: tl.constexpr = tl.constexpr(SMALLEST)


@triton.jit
def add_tile(S, z, fk, v, total, document, whole, begun):
    """The state after a tile."""
    left = fk.to(tl.float32) * left_at_end(total, document, whole, begun)[:, None]
    kept = left_of_state(whole, begun)
    return kept * S + product(tl.trans(left.to(v.dtype)), v), kept * z + tl.sum(left, 0)


@triton.jit
def sum_segments(
    k,
    v,
    starts,
    log_decay,
    states,
    kept,
    k_stride,
    v_stride,
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
    """What each segment adds to the state, written to the place after it, and what it keeps of the one before."""
    line, segment = tl.program_id(0).to(tl.int64) // G, tl.program_id(0) % G
    row, head = line // H, line % H
    column, value = columns(K, BLOCK_F, MAP), tl.arange(0, BLOCK_E)
    S, z = tl.zeros((BLOCK_F, BLOCK_E), tl.float32), tl.zeros((BLOCK_F,), tl.float32)
    of_all = 1.0
    for tile in range(tiles):
        time = (segment * tiles + tile) * TILE + tl.arange(0, TILE)
        token, there = row * T + time, time < T
        fk = features(load(k, k_stride, token, head, column, there, K), column, there, K, MAP)
        x = load(v, v_stride, token, head, value, there, E)
        total, document, whole, begun = passed(starts, log_decay, token, head, there, H)
        S, z = add_tile(S, z, fk, x, total, document, whole, begun)
        of_all *= left_of_state(whole, begun)
    store_state(states, S, z, line, segment + 1, G + 1, F, E, BLOCK_F, BLOCK_E)
    tl.store(kept + line * G + segment, of_all)


@triton.jit
def carry(states, kept, G, numbers, BACKWARDS: tl.constexpr, BLOCK: tl.constexpr):
    """Add to each of the states (B H, G + 1, numbers) what is kept of the one before; backwards, of the one after."""
    line = tl.program_id(0).to(tl.int64)
    number = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = states + line * (G + 1) * numbers + number
    there = number < numbers
    x = tl.load(here + (G if BACKWARDS else 0) * numbers, mask=there, other=0.0)
    for step in range(G):
        segment = G - 1 - step if BACKWARDS else step
        into = here + (segment if BACKWARDS else segment + 1) * numbers
        x = x * tl.load(kept + line * G + segment) + tl.load(into, mask=there, other=0.0)
        tl.store(into, x, mask=there)


@triton.jit
def read(
    q,
    k,
    v,
    starts,
    log_decay,
    states,
    y,
    denominators,
    q_stride,
    k_stride,
    v_stride,
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
    """The outputs of each segment and what they were divided by."""
    line, segment = tl.program_id(0).to(tl.int64) // G, tl.program_id(0) % G
    row, head = line // H, line % H
    column, value = columns(K, BLOCK_F, MAP), tl.arange(0, BLOCK_E)
    S, z = load_state(states, line, segment, G + 1, F, E, BLOCK_F, BLOCK_E)
    for tile in range(tiles):
        time = (segment * tiles + tile) * TILE + tl.arange(0, TILE)
        token, there = row * T + time, time < T
        fq = features(load(q, q_stride, token, head, column, there, K), column, there, K, MAP)
        fk = features(load(k, k_stride, token, head, column, there, K), column, there, K, MAP)
        x = load(v, v_stride, token, head, value, there, E)
        total, document, whole, begun = passed(starts, log_decay, token, head, there, H)
        weights = product(fq, tl.trans(fk)) * left_within(total, document, starts, log_decay)
        seen = left_of_state(total, document)
        numerator = product(weights.to(x.dtype), x) + seen[:, None] * product(fq, S.to(x.dtype))
        of_state = tl.sum(fq.to(tl.float32) * z[None, :], 1)
        denominator = tl.maximum(tl.sum(weights, 1) + seen * of_state, LEAST)
        store(y, numerator / denominator[:, None], H * E, token, head, value, there, E)
        tl.store(denominators + token * H + head, denominator, mask=there)
        S, z = add_tile(S, z, fk, x, total, document, whole, begun)
