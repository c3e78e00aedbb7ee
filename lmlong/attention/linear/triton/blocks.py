"""How a kernel is divided among programs: the features and values that a program holds, its warps and its stages.

The choice follows from the sizes alone, by what the compiler reports for sm_80 to sm_100 of shared memory, registers,
spills and tensor cores (`tools/gpu_ready_parts/compiled.py`). Nothing is timed: a choice by timing could differ between
two runs, or the ranks of one, and with it the last digits of their results.
"""

from typing import NamedTuple

import torch
import triton


class Choice(NamedTuple):
    """The largest blocks of features and values, the warps of a program with these blocks, and the buffers for tiles
    that are loaded ahead."""

    features: int
    values: int
    num_warps: int
    num_stages: int


CHOICES = {
    "scan_states": {2: Choice(64, 64, 8, 3), 4: Choice(64, 32, 8, 2)},
    "tile_outputs": {2: Choice(64, 128, 8, 2), 4: Choice(16, 32, 8, 2)},
    "denominator_grads": {2: Choice(16, 128, 4, 1), 4: Choice(16, 128, 4, 1)},
    "backward_qk": {2: Choice(64, 32, 8, 2), 4: Choice(16, 32, 8, 1)},
    "backward_v": {2: Choice(64, 128, 8, 2), 4: Choice(32, 32, 8, 2)},
}
"""By kernel and the bytes of an input number."""

DIVIDED = {"scan_states": "FV", "tile_outputs": "V", "denominator_grads": "", "backward_qk": "F", "backward_v": "V"}
"""The dimensions each of whose blocks is a program of its own. A program goes through all blocks of the others."""

LARGEST_PADDING = 1.25
"""Upper bound of a padded size, relative to its size in the smallest blocks."""


class Launch(NamedTuple):
    blocks: int
    """The number of programs that share a tile or a segment."""
    options: dict[str, int]
    """Of the kernel and the compiler."""


def launch_of(kernel: str, features: int, values: int, dtype: torch.dtype) -> Launch:
    """Return how a kernel is launched for states of a size and inputs of a dtype."""
    choice, blocks = CHOICES[kernel][dtype.itemsize], 1
    block_f, block_v = block_size(features, choice.features), block_size(values, choice.values)
    if "F" in DIVIDED[kernel]:
        blocks *= triton.cdiv(features, block_f)
    if "V" in DIVIDED[kernel]:
        blocks *= triton.cdiv(values, block_v)
    half = block_f * block_v <= choice.features * choice.values // 2
    warps = max(4, choice.num_warps // 2) if half else choice.num_warps
    stages = {"num_warps": warps, "num_stages": choice.num_stages}
    return Launch(blocks, {"BLOCK_F": block_f, "BLOCK_V": block_v, **stages})


def block_size(size: int, largest: int) -> int:
    """Return the largest power of two, from 16 to `largest`, that divides a size with little padding."""
    block, least = largest, triton.cdiv(size, 16) * 16
    while block > 16 and triton.cdiv(size, block) * block > LARGEST_PADDING * least:
        block //= 2
    return block
