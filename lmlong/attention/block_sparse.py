"""Softmax attention in which each query sees an interval of keys, block by block: no mask of all pairs exists.

On a GPU, flex_attention computes only the blocks that are listed, and evaluates the mask only in those that are not
seen whole. (`varlen_attn` computes no float32, knows no unused keys inside a document, and takes document borders as a
list, whose length would have to be read from the GPU.)

B batch, H query heads, G key/value heads, each shared by H / G neighbouring query heads, T queries, S keys, K key dim,
V value dim.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from lmlong.attention.device_policy import DevicePolicy
from lmlong.attention.key_blocks import BLOCK, VisibleKeys, block_lists


def attends(policy: DevicePolicy, q: Tensor) -> bool:
    """Return whether `attend` is the way to compute queries q. On a GPU its kernels do not multiply float64."""
    return policy.block_sparse and q.shape[2] > 1 and (q.device.type == "cpu" or q.dtype != torch.float64)


def attend(q: Tensor, k: Tensor, v: Tensor, visible: VisibleKeys) -> Tensor:
    """Return softmax(q K^T / sqrt(K)) V (B, H, T, V) of q (B, H, T, K), k (B, G, S, K) and v (B, G, S, V), over the
    keys that each query sees, of which there must be one."""
    if q.device.type == "cpu":
        from lmlong.attention.block_sparse_cpu import read_blocks

        lists = [tensor for part in block_lists(visible) for tensor in part]
        return read_blocks(q, k, v, list(visible), lists)

    from lmlong.attention.untraced import untraced

    # the same kernel whether or not torch.compile runs the model
    return untraced(by_flex_attention, q, k, v, visible)


def by_flex_attention(q: Tensor, k: Tensor, v: Tensor, visible: VisibleKeys) -> Tensor:
    """Compute `attend` on a GPU."""
    width, values = q.shape[3], v.shape[3]
    if min(width, values) < NARROWEST:
        q, k, v = (pad(x, (0, max(0, NARROWEST - x.shape[3]))) for x in (q, k, v))
    others = [*visible, *(x for part in block_lists(visible) for x in part)]
    for x, dimensions in (*((x, (0, 2)) for x in (q, k, v)), *((x, range(x.ndim)) for x in others)):
        for dimension in dimensions:  # one kernel for all numbers of rows and tokens
            torch._dynamo.maybe_mark_dynamic(x, dimension)
    return compiled_kernel(q.dtype, width, values)(q, k, v, *others)[..., :values]


MASK_PARTS = (
    *("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"),
    *("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices"),
)
"""The names of the lists of blocks in a BlockMask."""

NARROWEST = 16
"""Width of the narrowest heads that the kernels multiply."""


@cache
def compiled_kernel(dtype: torch.dtype, width: int, values: int) -> Any:
    """Return flex attention for heads of a width, and a width of values."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    options: Any = kernel_options(dtype, max(width, values))
    scale: float = width**-0.5

    def attention(
        q: Tensor, k: Tensor, v: Tensor, first: Tensor, last: Tensor, in_use: Tensor, *lists: Tensor
    ) -> Tensor:
        def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (first[row, query] <= key) & (key <= last[query]) & in_use[row, key]

        parts: Any = dict(zip(MASK_PARTS, lists, strict=True))
        lengths, block = (q.shape[2], k.shape[2]), (BLOCK, BLOCK)
        mask = BlockMask(seq_lengths=lengths, **parts, BLOCK_SIZE=block, mask_mod=sees)
        grouped = q.shape[1] != k.shape[1]
        return flex_attention(q, k, v, block_mask=mask, scale=scale, enable_gqa=grouped, kernel_options=options)

    # compiled again for one row, one block of queries or keys, and without gradients, but not for each length
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    # uncompiled, flex_attention computes all pairs: beyond the limit, with `fullgraph` it raises instead
    return torch.compile(attention, dynamic=False, fullgraph=True)


class Tiles(NamedTuple):
    """The sizes of a kernel of flex_attention."""

    owned: int
    """Queries of a program, or keys where it computes dk and dv."""
    step: int
    """Keys, or queries, that it reads at once."""
    warps: int
    stages: int


TILES: dict[int, dict[int, tuple[Tiles, Tiles]]] = {
    2: {
        32: (Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 2)),
        64: (Tiles(128, 64, 8, 3), Tiles(64, 32, 4, 2)),
        128: (Tiles(128, 64, 8, 2), Tiles(64, 32, 8, 1)),
        256: (Tiles(64, 32, 8, 2), Tiles(32, 32, 8, 1)),
    },
    4: {
        32: (Tiles(64, 32, 4, 2), Tiles(16, 16, 4, 1)),
        64: (Tiles(64, 32, 8, 2), Tiles(32, 32, 8, 1)),
        128: (Tiles(32, 32, 8, 1), Tiles(16, 16, 4, 1)),
        256: (Tiles(16, 16, 4, 1), Tiles(16, 16, 8, 1)),
    },
}
"""Tiles of the forward and the backward pass, by the bytes of a number and the widest head. Compiled for sm_80 to
sm_100 (tools/gpu_ready), they need at most 99 KiB of shared memory, an RTX 4090's, and spill up to 256 bytes a thread,
784 for float32 heads of 256. Those of torch 2.13 need up to 148 KiB, or spill up to 39 KB."""


def kernel_options(dtype: torch.dtype, width: int) -> dict[str, Any]:
    """Return the options of flex_attention for heads up to `width` wide."""
    # the same kernel for any number of queries: below 128, torch would compile another
    options: dict[str, Any] = {"FORCE_USE_FLEX_ATTENTION": True}
    tiles = TILES.get(dtype.itemsize, {})
    known = [size for size in tiles if width <= size]
    if torch.version.hip is not None or not known:
        return options
    forward, backward = tiles[known[0]]
    if dtype == torch.float32:
        options["FLOAT32_PRECISION"] = "'tf32x3'"  # three products on tensor cores, as exact as float32
    for name, each in (("fwd", forward), ("bwd", backward)):
        options |= {f"{name}_num_warps": each.warps, f"{name}_num_stages": each.stages}
    owned, step = backward.owned, backward.step
    options |= {"fwd_BLOCK_M": forward.owned, "fwd_BLOCK_N": forward.step}
    return options | {"bwd_BLOCK_M1": step, "bwd_BLOCK_N1": owned, "bwd_BLOCK_M2": owned, "bwd_BLOCK_N2": step}
