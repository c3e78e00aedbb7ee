"""The backward pass of the causal scan: first the gradients of the states, then the gradients of the inputs.

States are computed from the first tile to the last, their gradients from the last to the first. The gradients of
queries need the states; the gradients of keys and values need the states' gradients. Each has its own kernel. Features
and weights are recomputed.

dx is the gradient of x; n are the numerators and m the denominators of the outputs. Other letters are those of
`tiles.py`.
"""

import triton
import triton.language as tl

from lmlong.attention.linear.triton.forward import MIN_DENOMINATOR, update_state
from lmlong.attention.linear.triton.tiles import (
    TILE,
    cumulative_decay,
    decay_from_state,
    decay_mask,
    decay_to_end,
    feature_columns,
    feature_map,
    feature_map_backward,
    load_state,
    load_tile,
    matmul,
    store_state,
    store_tile,
)


@triton.jit
def output_grads(dy, y, denominators, dy_stride, token, head, value_columns, valid, H, V):
    """Return dn (TILE, BLOCK_V), in the dtype of dy, and dm (TILE,), in float32."""
    denominator = tl.load(denominators + token * H + head, mask=valid, other=1.0)
    dy_tile = load_tile(dy, dy_stride, token, head, value_columns, valid, V)
    dn = dy_tile.to(tl.float32) / denominator[:, None]
    dn_y = tl.sum(dn * load_tile(y, H * V, token, head, value_columns, valid, V).to(tl.float32), 1)
    return dn.to(dy_tile.dtype), tl.where(denominator > MIN_DENOMINATOR, -dn_y, 0.0)


@triton.jit
def update_dstate(dS, dz, fq, dn, dm, total, document, tile_total, tile_document):
    """Return the gradient of the state before a tile."""
    decayed = fq.to(tl.float32) * decay_from_state(total, document)[:, None]
    decay = decay_from_state(tile_total, tile_document)
    return decay * dS + matmul(tl.trans(decayed.to(dn.dtype)), dn), decay * dz + tl.sum(decayed * dm[:, None], 0)


@triton.jit
def segment_dstates(
    q,
    document_starts,
    log_decay,
    y,
    denominators,
    dy,
    dstates,
    q_stride,
    dy_stride,
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
    """Store the contribution of each segment to the gradient of the state before it."""
    line, segment = tl.program_id(0).to(tl.int64) // G, tl.program_id(0) % G
    row, head = line // H, line % H
    columns, value_columns = feature_columns(BLOCK_F, FEATURE_MAP), tl.arange(0, BLOCK_V)
    dS, dz = tl.zeros((BLOCK_F, BLOCK_V), tl.float32), tl.zeros((BLOCK_F,), tl.float32)
    for tile in range(tiles):
        time = (segment * tiles + tiles - 1 - tile) * TILE + tl.arange(0, TILE)
        token, valid = row * T + time, time < T
        fq = feature_map(load_tile(q, q_stride, token, head, columns, valid, K), columns, valid, K, FEATURE_MAP)
        dn, dm = output_grads(dy, y, denominators, dy_stride, token, head, value_columns, valid, H, V)
        total, document, tile_total, tile_document = cumulative_decay(document_starts, log_decay, token, head, valid, H)
        dS, dz = update_dstate(dS, dz, fq, dn, dm, total, document, tile_total, tile_document)
    store_state(dstates, dS, dz, line, segment, G + 1, F, V, BLOCK_F, BLOCK_V)


@triton.jit
def backward_q(
    q,
    k,
    v,
    document_starts,
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
    V,
    G,
    tiles,
    FEATURE_MAP: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Store dq and, if `pairs` is given, fq . dfq for the gradient of the log decays."""
    line, segment = tl.program_id(0).to(tl.int64) // G, tl.program_id(0) % G
    row, head = line // H, line % H
    columns, value_columns = feature_columns(BLOCK_F, FEATURE_MAP), tl.arange(0, BLOCK_V)
    S, z = load_state(states, line, segment, G + 1, F, V, BLOCK_F, BLOCK_V)
    for tile in range(tiles):
        time = (segment * tiles + tile) * TILE + tl.arange(0, TILE)
        token, valid = row * T + time, time < T
        q_tile = load_tile(q, q_stride, token, head, columns, valid, K)
        fk = feature_map(load_tile(k, k_stride, token, head, columns, valid, K), columns, valid, K, FEATURE_MAP)
        v_tile = load_tile(v, v_stride, token, head, value_columns, valid, V)
        dn, dm = output_grads(dy, y, denominators, dy_stride, token, head, value_columns, valid, H, V)
        total, document, tile_total, tile_document = cumulative_decay(document_starts, log_decay, token, head, valid, H)
        A = (matmul(dn, tl.trans(v_tile)) + dm[:, None]) * decay_mask(total, document, document_starts, log_decay)
        state_grad = matmul(dn, tl.trans(S).to(v_tile.dtype)) + dm[:, None] * z[None, :]
        dfq = matmul(A.to(v_tile.dtype), fk) + decay_from_state(total, document)[:, None] * state_grad
        store_tile(dq, feature_map_backward(q_tile, dfq, FEATURE_MAP), H * K, token, head, columns, valid, K)
        if pairs is not None:
            fq = feature_map(q_tile, columns, valid, K, FEATURE_MAP)
            tl.store(pairs + token * H + head, tl.sum(fq.to(tl.float32) * dfq, 1), mask=valid)
        S, z = update_state(S, z, fk, v_tile, total, document, tile_total, tile_document)


@triton.jit
def backward_kv(
    q,
    k,
    v,
    document_starts,
    log_decay,
    states,
    dstates,
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
    V,
    G,
    tiles,
    FEATURE_MAP: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Store dk and dv, and turn the `pairs` of `backward_q` into the gradient of the log decays."""
    line, segment = tl.program_id(0).to(tl.int64) // G, tl.program_id(0) % G
    row, head = line // H, line % H
    columns, value_columns = feature_columns(BLOCK_F, FEATURE_MAP), tl.arange(0, BLOCK_V)
    dS, dz = load_state(dstates, line, segment + 1, G + 1, F, V, BLOCK_F, BLOCK_V)
    S, z = load_state(states, line, segment + 1, G + 1, F, V, BLOCK_F, BLOCK_V)
    later = tl.sum(S * dS) + tl.sum(z * dz)  # the gradient of log decays after the tile
    for tile in range(tiles):
        time = (segment * tiles + tiles - 1 - tile) * TILE + tl.arange(0, TILE)
        token, valid = row * T + time, time < T
        k_tile = load_tile(k, k_stride, token, head, columns, valid, K)
        fk = feature_map(k_tile, columns, valid, K, FEATURE_MAP)
        fq = feature_map(load_tile(q, q_stride, token, head, columns, valid, K), columns, valid, K, FEATURE_MAP)
        v_tile = load_tile(v, v_stride, token, head, value_columns, valid, V)
        dn, dm = output_grads(dy, y, denominators, dy_stride, token, head, value_columns, valid, H, V)
        total, document, tile_total, tile_document = cumulative_decay(document_starts, log_decay, token, head, valid, H)
        mask = decay_mask(total, document, document_starts, log_decay)
        to_end = decay_to_end(total, document, tile_total, tile_document)[:, None]
        A = (matmul(dn, tl.trans(v_tile)) + dm[:, None]) * mask
        weights = matmul(fq, tl.trans(fk)) * mask
        state_grad = matmul(v_tile, tl.trans(dS).to(v_tile.dtype)) + dz[None, :]
        dfk = matmul(tl.trans(A).to(v_tile.dtype), fq) + to_end * state_grad
        dv_tile = matmul(tl.trans(weights).to(v_tile.dtype), dn) + to_end * matmul(fk, dS.to(v_tile.dtype))
        store_tile(dk, feature_map_backward(k_tile, dfk, FEATURE_MAP), H * K, token, head, columns, valid, K)
        store_tile(dv, dv_tile, H * V, token, head, value_columns, valid, V)
        if pairs is not None:
            pair = tl.load(pairs + token * H + head, mask=valid, other=0.0) - tl.sum(fk.to(tl.float32) * dfk, 1)
            tl.store(pairs + token * H + head, later + tl.cumsum(pair, 0, reverse=True), mask=valid)
            later += tl.sum(pair, 0)
        dS, dz = update_dstate(dS, dz, fq, dn, dm, total, document, tile_total, tile_document)
