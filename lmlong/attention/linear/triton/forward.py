"""The outputs of the causal scan, from the states before each tile. Letters are those of `tiles.py`."""

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
    load_features,
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
