"""Functions that all kernels share: loading and storing tiles of tokens, feature maps, decays, matrix products.

Formulas and letters are those of `linear/chunk.py`, with a tile as the chunk: W, a, u and r are its decays.

B batch, H heads, T time, F features, V value dim, N tiles, G segments.
"""

import math
import os

import triton
import triton.language as tl

from lmlong.attention import feature_maps

TILE: tl.constexpr = tl.constexpr(64)
"""Tokens in a tile. Within a tile attention is a masked product; the state carries it from tile to tile."""

LENGTHS = ["T", "N", "G", "tiles"]
"""Arguments of kernels that differ with the length of a text. No kernel is compiled again for a new length."""

ELU_FLOOR: tl.constexpr = tl.constexpr(feature_maps.ELU_FLOOR)
RELU_FLOOR: tl.constexpr = tl.constexpr(feature_maps.Relu.FLOOR)
LOG2_E: tl.constexpr = tl.constexpr(1 / math.log(2))

INTERPRETED: tl.constexpr = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
"""Triton's interpreter stores a bfloat16 as the integer of its bits, and would multiply these integers."""


@triton.jit
def add_matmul(total, left, right):
    """Return total + left @ right, in float32.

    Float32 factors are split into two TF32 numbers each, x = x1 + x2 up to 2^-21 |x|, and multiplied as
    x1 y1 + x1 y2 + x2 y1. So the error of a product x y is at most 1.25 * 2^-20 |x y|, about 1.2e-6."""
    if INTERPRETED:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, total, input_precision="tf32x3")


@triton.jit
def block_of_program(BLOCKS: tl.constexpr, N, H):
    """Return the block that this program computes, of BLOCKS in each of N tiles: its number, batch_head, tile, row and
    head."""
    block, program = tl.program_id(0) % BLOCKS, tl.program_id(0) // BLOCKS
    batch_head, tile = program.to(tl.int64) // N, program % N
    return block, batch_head, tile, batch_head // H, batch_head % H


@triton.jit
def tile_tokens(tile, row, T):
    """Return the tokens (TILE,) of a tile as rows of (B T, ...), and which of them exist."""
    time = tile * TILE + tl.arange(0, TILE)
    return row * T + time, time < T


@triton.jit
def load_tile(x, stride, token, head, columns, valid, WIDTH: tl.constexpr):
    """Load columns (TILE, BLOCK) of the tokens of one head; 0 for padded tokens and columns."""
    offsets = token[:, None] * stride + head * WIDTH + columns[None, :]
    return tl.load(x + offsets, mask=valid[:, None] & (columns < WIDTH)[None, :], other=0.0)


@triton.jit
def store_tile(x, value, stride, token, head, columns, valid, WIDTH: tl.constexpr):
    """Store what `load_tile` loads."""
    offsets = token[:, None] * stride + head * WIDTH + columns[None, :]
    mask = valid[:, None] & (columns < WIDTH)[None, :]
    tl.store(x + offsets, value.to(x.dtype.element_ty), mask=mask)


@triton.jit
def feature_map(x, columns, valid, F: tl.constexpr, FEATURE_MAP: tl.constexpr):
    """Return the features of tokens x (TILE, BLOCK), in their dtype; 0 for padded tokens and columns."""
    phi = x
    if FEATURE_MAP != "identity":
        x32 = x.to(tl.float32)
        phi32 = tl.maximum(x32, 0.0)
        if FEATURE_MAP == "elu":
            phi32 += tl.exp(tl.minimum(x32, 0.0)) + ELU_FLOOR
        else:
            tl.static_assert(FEATURE_MAP == "relu")
            phi32 += RELU_FLOOR
        phi = tl.where(valid[:, None] & (columns < F)[None, :], phi32, 0.0).to(x.dtype)
    return phi


@triton.jit
def feature_map_backward(x, grad, FEATURE_MAP: tl.constexpr):
    """Return the gradient of tokens x (TILE, BLOCK) from the gradient of their features, in float32."""
    if FEATURE_MAP == "elu":
        grad = grad * tl.exp(tl.minimum(x.to(tl.float32), 0.0))
    elif FEATURE_MAP == "relu":
        grad = tl.where(x > 0, grad, 0.0)
    return grad


@triton.jit
def load_features(x, stride, token, head, columns, valid, F: tl.constexpr, FEATURE_MAP: tl.constexpr):
    """Load the features (TILE, BLOCK) of queries or keys."""
    return feature_map(load_tile(x, stride, token, head, columns, valid, F), columns, valid, F, FEATURE_MAP)


@triton.jit
def load_numerator_grads(dy, denominators, stride, token, head, columns, valid, H, V: tl.constexpr):
    """Load dn = dy / m (TILE, BLOCK), in the dtype of dy."""
    dy_tile = load_tile(dy, stride, token, head, columns, valid, V)
    denominator = tl.load(denominators + token * H + head, mask=valid, other=1.0)
    return (dy_tile.to(tl.float32) / denominator[:, None]).to(dy_tile.dtype)


@triton.jit
def cumulative_decay(document_starts, log_decay, token, head, valid, H):
    """Return the log2 decay from the start of the tile to each token, the number of documents that started in the tile
    up to each token, both (TILE,), and both values at the last token."""
    total, tile_total = tl.zeros((TILE,), tl.float32), 0.0
    document, tile_document = tl.zeros((TILE,), tl.int32), 0
    if log_decay is not None:
        log2_decay = tl.load(log_decay + token * H + head, mask=valid, other=0.0).to(tl.float32) * LOG2_E
        total, tile_total = tl.cumsum(log2_decay, 0), tl.sum(log2_decay, 0)
    if document_starts is not None:
        starts = tl.load(document_starts + token, mask=valid, other=0).to(tl.int32)
        document, tile_document = tl.cumsum(starts, 0), tl.sum(starts, 0)
    return total, document, tile_total, tile_document


@triton.jit
def decay_from_state(total, document, document_starts, log_decay):
    """Return a (TILE,), the decay at each token of the state before the tile; given the sums of the whole tile, r."""
    decay = total + 1.0
    if log_decay is not None:
        decay = tl.exp2(total)
    if document_starts is not None:
        decay = tl.where(document == 0, decay, 0.0)
    return decay


@triton.jit
def decay_to_end(total, document, tile_total, tile_document, document_starts, log_decay):
    """Return u (TILE,), the decay of each token at the end of the tile."""
    return decay_from_state(tl.minimum(tile_total - total, 0.0), tile_document - document, document_starts, log_decay)


@triton.jit
def decay_mask(total, document, document_starts, log_decay, TRANSPOSED: tl.constexpr = False):
    """Return W (TILE, TILE): the decay of each token (column) at each later token (row); or its transpose."""
    position = tl.arange(0, TILE)
    if TRANSPOSED:
        visible = position[:, None] <= position[None, :]
        between = total[None, :] - total[:, None]
    else:
        visible = position[:, None] >= position[None, :]
        between = total[:, None] - total[None, :]
    if document_starts is not None:
        visible = visible & (document[:, None] == document[None, :])
    mask = tl.where(visible, 1.0, 0.0)
    if log_decay is not None:
        # differences to the future are positive and could overflow
        mask *= tl.exp2(tl.minimum(between, 0.0))
    return mask


@triton.jit
def load_state(S, state, features, values, F: tl.constexpr, V: tl.constexpr):
    """Load a block of one of the states S (.., F, V)."""
    offsets = (state * F + features)[:, None] * V + values[None, :]
    return tl.load(S + offsets, mask=(features < F)[:, None] & (values < V)[None, :], other=0.0)


@triton.jit
def load_state_sum(z, state, features, F: tl.constexpr):
    """Load a block of one of the states z (.., F)."""
    return tl.load(z + state * F + features, mask=features < F, other=0.0)
