"""The forward pass of the causal scan: each segment's contribution to the state, the states between segments, outputs.

Each program computes one segment of one head of one row, tile by tile. More rows, heads and segments keep more of the
GPU busy. Letters are those of `tiles.py`.
"""

import triton
import triton.language as tl

from lmlong.attention.linear import naive
from lmlong.attention.linear.triton.tiles import (
    TILE,
    cumulative_decay,
    decay_from_state,
    decay_mask,
    decay_to_end,
    feature_columns,
    feature_map,
    load_state,
    load_tile,
    matmul,
    store_state,
    store_tile,
)

MIN_DENOMINATOR: tl.constexpr = tl.constexpr(naive.MIN_DENOMINATOR)


@triton.jit
def update_state(S, z, fk, v, total, document, tile_total, tile_document):
    """Return the state after a tile."""
    decayed = fk.to(tl.float32) * decay_to_end(total, document, tile_total, tile_document)[:, None]
    decay = decay_from_state(tile_total, tile_document)
    return decay * S + matmul(tl.trans(decayed.to(v.dtype)), v), decay * z + tl.sum(decayed, 0)


@triton.jit
def segment_states(
    k,
    v,
    document_starts,
    log_decay,
    states,
    decays,
    k_stride,
    v_stride,
    T,
    H,
    K,
    F,
    V,
    G,
    tiles,
    FEATURE_MAP: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Store each segment's contribution to the state after it, and its decay of the state before it."""
    line, segment = tl.program_id(0).to(tl.int64) // G, tl.program_id(0) % G
    row, head = line // H, line % H
    columns, value_columns = feature_columns(BLOCK_F, FEATURE_MAP), tl.arange(0, BLOCK_V)
    S, z = tl.zeros((BLOCK_F, BLOCK_V), tl.float32), tl.zeros((BLOCK_F,), tl.float32)
    decay = 1.0
    for tile in range(tiles):
        time = (segment * tiles + tile) * TILE + tl.arange(0, TILE)
        token, valid = row * T + time, time < T
        fk = feature_map(load_tile(k, k_stride, token, head, columns, valid, K), columns, valid, K, FEATURE_MAP)
        v_tile = load_tile(v, v_stride, token, head, value_columns, valid, V)
        total, document, tile_total, tile_document = cumulative_decay(document_starts, log_decay, token, head, valid, H)
        S, z = update_state(S, z, fk, v_tile, total, document, tile_total, tile_document)
        decay *= decay_from_state(tile_total, tile_document)
    store_state(states, S, z, line, segment + 1, G + 1, F, V, BLOCK_F, BLOCK_V)
    tl.store(decays + line * G + segment, decay)


@triton.jit
def accumulate_states(states, decays, G, size, BACKWARDS: tl.constexpr, BLOCK: tl.constexpr):
    """Add to each of the states (B H, G + 1, size) the decayed state before it, or after it when going backwards."""
    line = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    state = states + line * (G + 1) * size + element
    valid = element < size
    x = tl.load(state + (G if BACKWARDS else 0) * size, mask=valid, other=0.0)
    for step in range(G):
        segment = G - 1 - step if BACKWARDS else step
        into = state + (segment if BACKWARDS else segment + 1) * size
        x = x * tl.load(decays + line * G + segment) + tl.load(into, mask=valid, other=0.0)
        tl.store(into, x, mask=valid)


@triton.jit
def segment_outputs(
    q,
    k,
    v,
    document_starts,
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
    V,
    G,
    tiles,
    FEATURE_MAP: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Store the outputs of each segment and their denominators."""
    line, segment = tl.program_id(0).to(tl.int64) // G, tl.program_id(0) % G
    row, head = line // H, line % H
    columns, value_columns = feature_columns(BLOCK_F, FEATURE_MAP), tl.arange(0, BLOCK_V)
    S, z = load_state(states, line, segment, G + 1, F, V, BLOCK_F, BLOCK_V)
    for tile in range(tiles):
        time = (segment * tiles + tile) * TILE + tl.arange(0, TILE)
        token, valid = row * T + time, time < T
        fq = feature_map(load_tile(q, q_stride, token, head, columns, valid, K), columns, valid, K, FEATURE_MAP)
        fk = feature_map(load_tile(k, k_stride, token, head, columns, valid, K), columns, valid, K, FEATURE_MAP)
        v_tile = load_tile(v, v_stride, token, head, value_columns, valid, V)
        total, document, tile_total, tile_document = cumulative_decay(document_starts, log_decay, token, head, valid, H)
        weights = matmul(fq, tl.trans(fk)) * decay_mask(total, document, document_starts, log_decay)
        from_state = decay_from_state(total, document)
        numerator = matmul(weights.to(v_tile.dtype), v_tile) + from_state[:, None] * matmul(fq, S.to(v_tile.dtype))
        state_weight = tl.sum(fq.to(tl.float32) * z[None, :], 1)
        denominator = tl.maximum(tl.sum(weights, 1) + from_state * state_weight, MIN_DENOMINATOR)
        store_tile(y, numerator / denominator[:, None], H * V, token, head, value_columns, valid, V)
        tl.store(denominators + token * H + head, denominator, mask=valid)
        S, z = update_state(S, z, fk, v_tile, total, document, tile_total, tile_document)
