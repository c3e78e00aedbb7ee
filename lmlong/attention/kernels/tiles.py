"""What all kernels share: a tile of tokens of one head, its features, and what is left of what within it.

Formulas and letters are those of `attention/chunks.py`: W, a, u and r say how much of one token is left at another.

B batch, H heads, T time, K key width, F features, E value width, G segments.
"""

import math
import os

import triton
import triton.language as tl

from lmlong.attention.features import ELU_FLOOR, Cosine, Relu

TILE: tl.constexpr = tl.constexpr(64)
"""Tokens worked on at once: within them the past is a masked product, between them it is the state."""

ELU: tl.constexpr = tl.constexpr(ELU_FLOOR)
RELU: tl.constexpr = tl.constexpr(Relu.FLOOR)
SHRINK: tl.constexpr = tl.constexpr(Cosine.SHRINK)
TINY: tl.constexpr = tl.constexpr(Cosine.TINY)
LOG2_E: tl.constexpr = tl.constexpr(1 / math.log(2))

INTERPRETED: tl.constexpr = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
"""Triton's interpreter keeps a bfloat16 as the integer of its bits, and multiplies matrices of them as such."""


@triton.jit
def product(left, right):
    """A product of matrices, summed in float32; factors of float32 are not rounded to fewer digits."""
    if INTERPRETED:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, input_precision="ieee")


@triton.jit
def columns(WIDTH, BLOCK: tl.constexpr, MAP: tl.constexpr):
    """The column of a query or key that each feature stands at; cosine puts a constant before them all."""
    column = tl.arange(0, BLOCK)
    if MAP == "cosine":
        column -= 1
    return column


@triton.jit
def load(x, stride, token, head, column, there, WIDTH):
    """Columns of tokens (TILE, BLOCK) of one head; 0 where there is none."""
    place = token[:, None] * stride + head * WIDTH + column[None, :]
    return tl.load(x + place, mask=there[:, None] & (column >= 0)[None, :] & (column < WIDTH)[None, :], other=0.0)


@triton.jit
def store(x, value, stride, token, head, column, there, WIDTH):
    """Write what `load` reads."""
    place = token[:, None] * stride + head * WIDTH + column[None, :]
    real = there[:, None] & (column >= 0)[None, :] & (column < WIDTH)[None, :]
    tl.store(x + place, value.to(x.dtype.element_ty), mask=real)


@triton.jit
def features(x, column, there, WIDTH, MAP: tl.constexpr):
    """Of tokens (TILE, BLOCK), in their own type; 0 for tokens and columns that do not exist."""
    precise = x.to(tl.float32)
    if MAP == "elu":
        phi = tl.maximum(precise, 0.0) + tl.exp(tl.minimum(precise, 0.0)) + ELU
    elif MAP == "relu":
        phi = tl.maximum(precise, 0.0) + RELU
    elif MAP == "cosine":
        direction = SHRINK * precise / tl.sqrt(tl.sum(precise * precise, 1) + TINY)[:, None]
        phi = tl.where((column == -1)[None, :], 1.0, direction)
    else:
        phi = precise
    return tl.where(there[:, None] & (column < WIDTH)[None, :], phi, 0.0).to(x.dtype)


@triton.jit
def slopes_before(x, slopes, MAP: tl.constexpr):
    """From the gradients of the features, in float32, to those of the tokens x (TILE, BLOCK)."""
    precise = x.to(tl.float32)
    if MAP == "elu":
        slopes = slopes * tl.exp(tl.minimum(precise, 0.0))
    elif MAP == "relu":
        slopes = tl.where(precise > 0, slopes, 0.0)
    elif MAP == "cosine":
        square = tl.sum(precise * precise, 1) + TINY
        along = tl.sum(precise * slopes, 1) / square  # the column of the constant is 0 in x
        slopes = SHRINK / tl.sqrt(square)[:, None] * (slopes - precise * along[:, None])
    return slopes


@triton.jit
def passed(starts, log_decay, token, head, there, H):
    """Of each token: the log decay from before the tile up to it, in powers of 2, and the documents begun since; then
    both up to the last token."""
    total = tl.zeros((TILE,), tl.float32)
    document = tl.zeros((TILE,), tl.int32)
    if log_decay is not None:
        total += tl.load(log_decay + token * H + head, mask=there, other=0.0).to(tl.float32) * LOG2_E
    if starts is not None:
        document += tl.load(starts + token, mask=there, other=0).to(tl.int32)
    return tl.cumsum(total, 0), tl.cumsum(document, 0), tl.sum(total, 0), tl.sum(document, 0)


@triton.jit
def left_within(total, document, starts, log_decay):
    """W (TILE, TILE): what is left of each token (a column) at each later one (a row)."""
    place = tl.arange(0, TILE)
    seen = place[:, None] >= place[None, :]
    if starts is not None:
        seen = seen & (document[:, None] == document[None, :])
    left = tl.where(seen, 1.0, 0.0)
    if log_decay is not None:
        # differences to the future are positive and could overflow
        left *= tl.exp2(tl.minimum(total[:, None] - total[None, :], 0.0))
    return left


@triton.jit
def left_of_state(total, document):
    """a (TILE,): what is left at each token of the state before the tile; of the last one, r."""
    return tl.where(document == 0, tl.exp2(total), 0.0)


@triton.jit
def left_at_end(total, document, whole, begun):
    """u (TILE,): what is left of each token after the tile."""
    return tl.where(document == begun, tl.exp2(tl.minimum(whole - total, 0.0)), 0.0)


@triton.jit
def load_state(states, line, place, places, F, E, BLOCK_F: tl.constexpr, BLOCK_E: tl.constexpr):
    """S (BLOCK_F, BLOCK_E) and z (BLOCK_F,) of a place in states (B H, places, F, E + 1)."""
    feature, value = tl.arange(0, BLOCK_F), tl.arange(0, BLOCK_E)
    here = states + (line * places + place) * F * (E + 1) + feature * (E + 1)
    there = feature < F
    S = tl.load(here[:, None] + value[None, :], mask=there[:, None] & (value < E)[None, :], other=0.0)
    return S, tl.load(here + E, mask=there, other=0.0)


@triton.jit
def store_state(states, S, z, line, place, places, F, E, BLOCK_F: tl.constexpr, BLOCK_E: tl.constexpr):
    """Write what `load_state` reads."""
    feature, value = tl.arange(0, BLOCK_F), tl.arange(0, BLOCK_E)
    here = states + (line * places + place) * F * (E + 1) + feature * (E + 1)
    there = feature < F
    tl.store(here[:, None] + value[None, :], S, mask=there[:, None] & (value < E)[None, :])
    tl.store(here + E, z, mask=there)
