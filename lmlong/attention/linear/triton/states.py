"""The states before each tile, and the gradients of the states after each tile.

A segment is a few tiles. First each segment's contribution to the state is computed, all segments at once; then the
states between segments, one after the other; then the states between the tiles of all segments, from the states
between segments. So the work is parallel over the text as well as over heads, features and values. Sums are float32;
the states between tiles are rounded to the dtype of the matrix products that read them.

Letters are those of `tiles.py`.
"""

import triton
import triton.language as tl

from lmlong.attention.linear.triton.tiles import (
    LENGTHS,
    add_matmul,
    block_of_program,
    cumulative_decay,
    decay_from_state,
    decay_to_end,
    load_features,
    load_numerator_grads,
    load_tile,
    tile_tokens,
)


@triton.jit(do_not_specialize=LENGTHS)
def scan_states(
    qk,
    values,
    denominators,
    dm,
    document_starts,
    log_decay,
    borders,
    decays,
    S_tiles,
    z_tiles,
    qk_stride,
    value_stride,
    T,
    H,
    N,
    G,
    tiles,
    F: tl.constexpr,
    V: tl.constexpr,
    FEATURE_MAP: tl.constexpr,
    BACKWARDS: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Go through a segment. Without `S_tiles`, store its contribution to the state after it, and its decay. Otherwise,
    start from the state before it, and store the state before each tile.

    Backwards, the same for the gradients of states: queries take the place of keys, and dy the place of values."""
    BLOCKS_F: tl.constexpr = (F + BLOCK_F - 1) // BLOCK_F
    BLOCKS_V: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    block, batch_head, segment, row, head = block_of_program(BLOCKS_F * BLOCKS_V, G, H)
    f = block // BLOCKS_V * BLOCK_F + tl.arange(0, BLOCK_F)
    v = block % BLOCKS_V * BLOCK_V + tl.arange(0, BLOCK_V)
    f_valid, sv_valid = f < F, (f < F)[:, None] & (v < V)[None, :]
    # states after the segment, or before it: the last or the first of its borders
    border = batch_head * (G + 1) + segment + (1 if (S_tiles is None) != BACKWARDS else 0)
    border_rows = borders + (border * F + f) * (V + 1)
    S, z = tl.zeros((BLOCK_F, BLOCK_V), tl.float32), tl.zeros((BLOCK_F,), tl.float32)
    if S_tiles is not None:
        S += tl.load(border_rows[:, None] + v[None, :], mask=sv_valid, other=0.0)
        z += tl.load(border_rows + V, mask=f_valid, other=0.0)
    decay = 1.0
    first = segment * tiles
    count = tl.minimum(tiles, N - first)
    for step in range(count):
        tile = first + (count - 1 - step if BACKWARDS else step)
        if S_tiles is not None:
            state_rows = (batch_head * N + tile) * F + f
            tl.store(S_tiles + state_rows[:, None] * V + v[None, :], S.to(S_tiles.dtype.element_ty), mask=sv_valid)
            if block % BLOCKS_V == 0:
                tl.store(z_tiles + state_rows, z, mask=f_valid)
        token, valid = tile_tokens(tile, row, T)
        features = load_features(qk, qk_stride, token, head, f, valid, F, FEATURE_MAP).to(tl.float32)
        total, document, tile_total, tile_document = cumulative_decay(document_starts, log_decay, token, head, valid, H)
        if BACKWARDS:
            features *= decay_from_state(total, document, document_starts, log_decay)[:, None]
            value = load_numerator_grads(values, denominators, value_stride, token, head, v, valid, H, V)
            dz = tl.sum(features * tl.load(dm + token * H + head, mask=valid, other=0.0)[:, None], 0)
        else:
            features *= decay_to_end(total, document, tile_total, tile_document, document_starts, log_decay)[:, None]
            value = load_tile(values, value_stride, token, head, v, valid, V)
            dz = tl.sum(features, 0)
        r = decay_from_state(tile_total, tile_document, document_starts, log_decay)
        S = add_matmul(S * r, tl.trans(features.to(value.dtype)), value)
        z = z * r + dz
        decay *= r
    if S_tiles is None:
        tl.store(border_rows[:, None] + v[None, :], S, mask=sv_valid)
        if block % BLOCKS_V == 0:
            tl.store(border_rows + V, z, mask=f_valid)
        if block == 0 and not BACKWARDS:
            tl.store(decays + batch_head * G + segment, decay)


@triton.jit(do_not_specialize=LENGTHS)
def accumulate_states(state, borders, decays, after, G, size, BACKWARDS: tl.constexpr, BLOCK: tl.constexpr):
    """Turn contributions of segments into the states between them: borders (B H, G + 1, size) that start with `state`.
    Store the last in `after`. Backwards, start with the last border and store the first."""
    batch_head = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = element < size
    x = tl.load(state + batch_head * size + element, mask=valid, other=0.0)
    border = borders + batch_head * (G + 1) * size + element
    tl.store(border + (G if BACKWARDS else 0) * size, x, mask=valid)
    for step in range(G):
        segment = G - 1 - step if BACKWARDS else step
        into = border + (segment if BACKWARDS else segment + 1) * size
        x = x * tl.load(decays + batch_head * G + segment) + tl.load(into, mask=valid, other=0.0)
        tl.store(into, x, mask=valid)
    tl.store(after + batch_head * size + element, x, mask=valid)
