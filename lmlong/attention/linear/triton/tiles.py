"""Functions that all kernels share: loading and storing tiles of tokens, feature maps, decay masks, matrix products.

Formulas and letters are those of `linear/chunk.py`, with a tile as the chunk: W, a, u and r are its decay masks.

B batch, H heads, T time, K key dim, F features, V value dim, G segments.
"""

import math
import os

import triton
import triton.language as tl

from lmlong.attention import feature_maps

TILE: tl.constexpr = tl.constexpr(64)
"""Tokens in a tile. Within a tile attention is a masked product; the state carries it from tile to tile."""

ELU_FLOOR: tl.constexpr = tl.constexpr(feature_maps.ELU_FLOOR)
RELU_FLOOR: tl.constexpr = tl.constexpr(feature_maps.Relu.FLOOR)
COSINE_SHRINK: tl.constexpr = tl.constexpr(feature_maps.Cosine.SHRINK)
COSINE_TINY: tl.constexpr = tl.constexpr(feature_maps.Cosine.TINY)
LOG2_E: tl.constexpr = tl.constexpr(1 / math.log(2))

INTERPRETED: tl.constexpr = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
"""Triton's interpreter stores a bfloat16 as the integer of its bits, and would multiply these integers."""


@triton.jit
def matmul(left, right):
    """Return the product of two matrices, summed in float32; float32 factors are not rounded to TF32."""
    if INTERPRETED:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, input_precision="ieee")


@triton.jit
def feature_columns(BLOCK: tl.constexpr, FEATURE_MAP: tl.constexpr):
    """Return the column of a query or key that each feature is computed from; cosine's first feature, a constant, has
    column -1."""
    columns = tl.arange(0, BLOCK)
    if FEATURE_MAP == "cosine":
        columns -= 1
    return columns


@triton.jit
def load_tile(x, stride, token, head, columns, valid, WIDTH):
    """Load columns (TILE, BLOCK) of the tokens of one head; 0 for padded tokens and columns."""
    offsets = token[:, None] * stride + head * WIDTH + columns[None, :]
    return tl.load(x + offsets, mask=valid[:, None] & (columns >= 0)[None, :] & (columns < WIDTH)[None, :], other=0.0)


@triton.jit
def store_tile(x, value, stride, token, head, columns, valid, WIDTH):
    """Store what `load_tile` loads."""
    offsets = token[:, None] * stride + head * WIDTH + columns[None, :]
    mask = valid[:, None] & (columns >= 0)[None, :] & (columns < WIDTH)[None, :]
    tl.store(x + offsets, value.to(x.dtype.element_ty), mask=mask)


@triton.jit
def feature_map(x, columns, valid, WIDTH, FEATURE_MAP: tl.constexpr):
    """Return the features of tokens x (TILE, BLOCK), in their dtype; 0 for padded tokens and columns."""
    x32 = x.to(tl.float32)
    if FEATURE_MAP == "elu":
        phi = tl.maximum(x32, 0.0) + tl.exp(tl.minimum(x32, 0.0)) + ELU_FLOOR
    elif FEATURE_MAP == "relu":
        phi = tl.maximum(x32, 0.0) + RELU_FLOOR
    elif FEATURE_MAP == "cosine":
        direction = COSINE_SHRINK * x32 / tl.sqrt(tl.sum(x32 * x32, 1) + COSINE_TINY)[:, None]
        phi = tl.where((columns == -1)[None, :], 1.0, direction)
    else:
        phi = x32
    return tl.where(valid[:, None] & (columns < WIDTH)[None, :], phi, 0.0).to(x.dtype)


@triton.jit
def feature_map_backward(x, grad, FEATURE_MAP: tl.constexpr):
    """Return the gradient of tokens x (TILE, BLOCK) from the gradient of their features, in float32."""
    x32 = x.to(tl.float32)
    if FEATURE_MAP == "elu":
        grad = grad * tl.exp(tl.minimum(x32, 0.0))
    elif FEATURE_MAP == "relu":
        grad = tl.where(x32 > 0, grad, 0.0)
    elif FEATURE_MAP == "cosine":
        square = tl.sum(x32 * x32, 1) + COSINE_TINY
        along = tl.sum(x32 * grad, 1) / square  # the column of the constant is 0 in x
        grad = COSINE_SHRINK / tl.sqrt(square)[:, None] * (grad - x32 * along[:, None])
    return grad


@triton.jit
def cumulative_decay(document_starts, log_decay, token, head, valid, H):
    """Return the log2 decay from the start of the tile to each token, the number of documents that started in the tile
    up to each token, both (TILE,), and both values at the last token."""
    log2_decay = tl.zeros((TILE,), tl.float32)
    starts = tl.zeros((TILE,), tl.int32)
    if log_decay is not None:
        log2_decay += tl.load(log_decay + token * H + head, mask=valid, other=0.0).to(tl.float32) * LOG2_E
    if document_starts is not None:
        starts += tl.load(document_starts + token, mask=valid, other=0).to(tl.int32)
    return tl.cumsum(log2_decay, 0), tl.cumsum(starts, 0), tl.sum(log2_decay, 0), tl.sum(starts, 0)


@triton.jit
def decay_mask(total, document, document_starts, log_decay):
    """Return W (TILE, TILE): the decay of each token (column) at each later token (row)."""
    position = tl.arange(0, TILE)
    visible = position[:, None] >= position[None, :]
    if document_starts is not None:
        visible = visible & (document[:, None] == document[None, :])
    mask = tl.where(visible, 1.0, 0.0)
    if log_decay is not None:
        # differences to the future are positive and could overflow
        mask *= tl.exp2(tl.minimum(total[:, None] - total[None, :], 0.0))
    return mask


@triton.jit
def decay_from_state(total, document):
    """Return a (TILE,): the decay at each token of the state before the tile; given the sums of the whole tile, r."""
    return tl.where(document == 0, tl.exp2(total), 0.0)


@triton.jit
def decay_to_end(total, document, tile_total, tile_document):
    """Return u (TILE,): the decay of each token at the end of the tile."""
    return tl.where(document == tile_document, tl.exp2(tl.minimum(tile_total - total, 0.0)), 0.0)


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
