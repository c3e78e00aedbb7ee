"""The outputs of the causal scan, and its gradients, from the states before each tile and the gradients of the states
after each tile.

The backward pass recomputes features and weights. dx is the gradient of x; n are the numerators and m the denominators
of the outputs. Other letters are those of `tiles.py`.
"""

import triton
import triton.language as tl

from lmlong.attention.linear import naive
from lmlong.attention.linear.triton.tiles import (
    LENGTHS,
    TILE,
    add_matmul,
    block_of_program,
    cumulative_decay,
    decay_from_state,
    decay_mask,
    decay_to_end,
    feature_map,
    feature_map_backward,
    load_features,
    load_numerator_grads,
    load_state,
    load_state_sum,
    load_tile,
    store_tile,
    tile_tokens,
)

MIN_DENOMINATOR: tl.constexpr = tl.constexpr(naive.MIN_DENOMINATOR)


@triton.jit(do_not_specialize=LENGTHS)
def tile_outputs(
    q,
    k,
    v,
    document_starts,
    log_decay,
    S_tiles,
    z_tiles,
    y,
    denominators,
    q_stride,
    k_stride,
    v_stride,
    T,
    H,
    N,
    F: tl.constexpr,
    V: tl.constexpr,
    FEATURE_MAP: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Store a block of the outputs of a tile, and its denominators."""
    BLOCKS_V: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    block, batch_head, tile, row, head = block_of_program(BLOCKS_V, N, H)
    values = block * BLOCK_V + tl.arange(0, BLOCK_V)
    token, valid = tile_tokens(tile, row, T)
    weights, denominator = tl.zeros((TILE, TILE), tl.float32), tl.zeros((TILE,), tl.float32)
    numerator = tl.zeros((TILE, BLOCK_V), tl.float32)
    for begin in range(0, F, BLOCK_F):
        features = begin + tl.arange(0, BLOCK_F)
        fq = load_features(q, q_stride, token, head, features, valid, F, FEATURE_MAP)
        fk = load_features(k, k_stride, token, head, features, valid, F, FEATURE_MAP)
        S = load_state(S_tiles, batch_head * N + tile, features, values, F, V)
        z = load_state_sum(z_tiles, batch_head * N + tile, features, F)
        weights = add_matmul(weights, fq, tl.trans(fk))
        numerator = add_matmul(numerator, fq, S)
        denominator += tl.sum(fq.to(tl.float32) * z[None, :], 1)
    total, document, _, _ = cumulative_decay(document_starts, log_decay, token, head, valid, H)
    from_state = decay_from_state(total, document, document_starts, log_decay)
    weights *= decay_mask(total, document, document_starts, log_decay)
    denominator = tl.maximum(tl.sum(weights, 1) + from_state * denominator, MIN_DENOMINATOR)
    v_tile = load_tile(v, v_stride, token, head, values, valid, V)
    numerator = add_matmul(numerator * from_state[:, None], weights.to(v_tile.dtype), v_tile)
    store_tile(y, numerator / denominator[:, None], H * V, token, head, values, valid, V)
    if block == 0:
        tl.store(denominators + token * H + head, denominator, mask=valid)


@triton.jit(do_not_specialize=LENGTHS)
def denominator_grads(
    y,
    denominators,
    dy,
    dm,
    dy_stride,
    T,
    H,
    N,
    F: tl.constexpr,
    V: tl.constexpr,
    FEATURE_MAP: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Store dm (B, T, H); 0 if m was clamped."""
    _, _, tile, row, head = block_of_program(1, N, H)
    token, valid = tile_tokens(tile, row, T)
    products = tl.zeros((TILE, BLOCK_V), tl.float32)
    for begin in range(0, V, BLOCK_V):
        values = begin + tl.arange(0, BLOCK_V)
        y_tile = load_tile(y, H * V, token, head, values, valid, V).to(tl.float32)
        products += y_tile * load_tile(dy, dy_stride, token, head, values, valid, V).to(tl.float32)
    denominator = tl.load(denominators + token * H + head, mask=valid, other=1.0)
    grad = tl.where(denominator > MIN_DENOMINATOR, -tl.sum(products, 1) / denominator, 0.0)
    tl.store(dm + token * H + head, grad, mask=valid)


@triton.jit(do_not_specialize=LENGTHS)
def backward_qk(
    q,
    k,
    v,
    document_starts,
    log_decay,
    S_tiles,
    z_tiles,
    dS_tiles,
    dz_tiles,
    denominators,
    dm,
    dy,
    dq,
    dk,
    pairs,
    q_stride,
    k_stride,
    v_stride,
    dy_stride,
    T,
    H,
    N,
    F: tl.constexpr,
    V: tl.constexpr,
    FEATURE_MAP: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Store a block of dq and dk of a tile. If `pairs` is given, store there the sum of fq . dfq - fk . dfk over the
    block, for the gradient of the log decays."""
    BLOCKS_F: tl.constexpr = (F + BLOCK_F - 1) // BLOCK_F
    block, batch_head, tile, row, head = block_of_program(BLOCKS_F, N, H)
    features = block * BLOCK_F + tl.arange(0, BLOCK_F)
    token, valid = tile_tokens(tile, row, T)
    A = tl.zeros((TILE, TILE), tl.float32)
    dfq, dfk = tl.zeros((TILE, BLOCK_F), tl.float32), tl.zeros((TILE, BLOCK_F), tl.float32)
    for begin in range(0, V, BLOCK_V):
        values = begin + tl.arange(0, BLOCK_V)
        v_tile = load_tile(v, v_stride, token, head, values, valid, V)
        dn = load_numerator_grads(dy, denominators, dy_stride, token, head, values, valid, H, V)
        S = load_state(S_tiles, batch_head * N + tile, features, values, F, V)
        dS = load_state(dS_tiles, batch_head * N + tile, features, values, F, V)
        A = add_matmul(A, dn, tl.trans(v_tile))
        dfq = add_matmul(dfq, dn, tl.trans(S))
        dfk = add_matmul(dfk, v_tile, tl.trans(dS))
    z = load_state_sum(z_tiles, batch_head * N + tile, features, F)
    dz = load_state_sum(dz_tiles, batch_head * N + tile, features, F)
    dm_tile = tl.load(dm + token * H + head, mask=valid, other=0.0)
    total, document, tile_total, tile_document = cumulative_decay(document_starts, log_decay, token, head, valid, H)
    from_state = decay_from_state(total, document, document_starts, log_decay)
    to_end = decay_to_end(total, document, tile_total, tile_document, document_starts, log_decay)
    q_tile = load_tile(q, q_stride, token, head, features, valid, F)
    k_tile = load_tile(k, k_stride, token, head, features, valid, F)
    fq = feature_map(q_tile, features, valid, F, FEATURE_MAP)
    fk = feature_map(k_tile, features, valid, F, FEATURE_MAP)
    A = (A + dm_tile[:, None]) * decay_mask(total, document, document_starts, log_decay)
    A_rounded = A.to(q_tile.dtype)
    dfq = add_matmul((dfq + dm_tile[:, None] * z[None, :]) * from_state[:, None], A_rounded, fk)
    store_tile(dq, feature_map_backward(q_tile, dfq, FEATURE_MAP), H * F, token, head, features, valid, F)
    dfk = add_matmul((dfk + dz[None, :]) * to_end[:, None], tl.trans(A_rounded), fq)
    store_tile(dk, feature_map_backward(k_tile, dfk, FEATURE_MAP), H * F, token, head, features, valid, F)
    if pairs is not None:
        pair = tl.sum(fq.to(tl.float32) * dfq - fk.to(tl.float32) * dfk, 1)
        tl.store(pairs + (token * H + head) * BLOCKS_F + block, pair, mask=valid)


@triton.jit(do_not_specialize=LENGTHS)
def backward_v(
    q,
    k,
    document_starts,
    log_decay,
    dS_tiles,
    denominators,
    dy,
    dv,
    q_stride,
    k_stride,
    dy_stride,
    T,
    H,
    N,
    F: tl.constexpr,
    V: tl.constexpr,
    FEATURE_MAP: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Store a block of dv of a tile."""
    BLOCKS_V: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    block, batch_head, tile, row, head = block_of_program(BLOCKS_V, N, H)
    values = block * BLOCK_V + tl.arange(0, BLOCK_V)
    token, valid = tile_tokens(tile, row, T)
    weights, dv_tile = tl.zeros((TILE, TILE), tl.float32), tl.zeros((TILE, BLOCK_V), tl.float32)
    for begin in range(0, F, BLOCK_F):
        features = begin + tl.arange(0, BLOCK_F)
        fq = load_features(q, q_stride, token, head, features, valid, F, FEATURE_MAP)
        fk = load_features(k, k_stride, token, head, features, valid, F, FEATURE_MAP)
        dS = load_state(dS_tiles, batch_head * N + tile, features, values, F, V)
        weights = add_matmul(weights, fk, tl.trans(fq))
        dv_tile = add_matmul(dv_tile, fk, dS)
    total, document, tile_total, tile_document = cumulative_decay(document_starts, log_decay, token, head, valid, H)
    weights *= decay_mask(total, document, document_starts, log_decay, TRANSPOSED=True)
    dn = load_numerator_grads(dy, denominators, dy_stride, token, head, values, valid, H, V)
    to_end = decay_to_end(total, document, tile_total, tile_document, document_starts, log_decay)
    dv_tile = add_matmul(dv_tile * to_end[:, None], weights.to(dn.dtype), dn)
    store_tile(dv, dv_tile, H * V, token, head, values, valid, V)


@triton.jit(do_not_specialize=LENGTHS)
def decay_grads(pairs, borders, dborders, grads, T, H, N, G, tiles, size, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """Store the gradients (B, T, H) of the log decays of a segment."""
    _, batch_head, segment, row, head = block_of_program(1, G, H)
    border = (batch_head * (G + 1) + segment + 1) * size
    products = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, size, BLOCK):
        element = begin + tl.arange(0, BLOCK)
        state = tl.load(borders + border + element, mask=element < size, other=0.0)
        products += state * tl.load(dborders + border + element, mask=element < size, other=0.0)
    later = tl.sum(products, 0)  # the gradient of log decays after the tile
    count = tl.minimum(tiles, N - segment * tiles)
    for step in range(count):
        token, valid = tile_tokens(segment * tiles + count - 1 - step, row, T)
        pair = tl.zeros((TILE,), tl.float32)
        for block in range(BLOCKS):
            pair += tl.load(pairs + (token * H + head) * BLOCKS + block, mask=valid, other=0.0)
        tl.store(grads + token * H + head, later + tl.cumsum(pair, 0, reverse=True), mask=valid)
        later += tl.sum(pair, 0)
