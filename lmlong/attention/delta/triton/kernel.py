"""The recurrence over chunks as one kernel: a program computes a few columns of one head's state over all chunks.

N chunks, B batch, H heads, C tokens in a chunk, F features, V value dim.
"""

import triton
import triton.language as tl

from lmlong.attention.linear.triton.tiles import matmul


@triton.jit
def chunk_recurrence(
    S,
    decay,
    A,
    B,
    C,
    E,
    X,
    N,
    lines,
    tokens,
    F,
    V,
    BACKWARDS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Fill S (N + 1, lines, F, V), which holds the initial state, and X (N, lines, C, V)."""
    line = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    token, feature = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_F)
    of_state = feature[:, None] * V + columns[None, :]
    in_state = (feature < F)[:, None] & (columns < V)[None, :]
    of_values, in_values = token[:, None] * V + columns[None, :], (token < tokens)[:, None] & (columns < V)[None, :]
    of_keys, in_keys = token[:, None] * F + feature[None, :], (token < tokens)[:, None] & (feature < F)[None, :]
    state = tl.load(S + ((N if BACKWARDS else 0) * lines + line) * F * V + of_state, mask=in_state, other=0.0)
    for step in range(N):
        n = N - 1 - step if BACKWARDS else step
        chunk = n * lines + line
        values, keys = chunk * tokens * V + of_values, chunk * tokens * F + of_keys
        x = tl.load(A + values, mask=in_values, other=0.0)
        x += matmul(tl.load(B + keys, mask=in_keys, other=0.0), state)
        tl.store(X + values, x, mask=in_values)
        if decay is not None:
            state *= tl.load(decay + chunk)
        state += matmul(tl.trans(tl.load(C + keys, mask=in_keys, other=0.0)), x)
        if E is not None:
            state += tl.load(E + chunk * F * V + of_state, mask=in_state, other=0.0)
        tl.store(S + ((n if BACKWARDS else n + 1) * lines + line) * F * V + of_state, state, mask=in_state)
