"""The blocks of features and values that a program holds, and its warps and pipeline stages, for each kernel.

They were chosen by what the compiler reports for sm_80 to sm_100 (`tools/gpu_ready_parts/compiled.py`): shared memory,
spills and tensor cores.
"""

from typing import NamedTuple

import torch
import triton


class Choice(NamedTuple):
    """The largest blocks of a program, and how it is compiled."""

    features: int
    values: int
    num_warps: int
    num_stages: int


CHOICES = {
    "scan_states": {2: Choice(64, 64, 4, 3), 4: Choice(64, 32, 4, 2)},
    "tile_outputs": {2: Choice(64, 64, 4, 2), 4: Choice(32, 64, 4, 2)},
    "denominator_grads": {2: Choice(64, 128, 4, 1), 4: Choice(64, 128, 4, 1)},
    "backward_qk": {2: Choice(64, 64, 4, 1), 4: Choice(32, 32, 4, 1)},
    "backward_v": {2: Choice(64, 64, 4, 2), 4: Choice(32, 64, 4, 2)},
}
"""By kernel and the bytes of an input number."""

DIVIDED = {"scan_states": "FV", "tile_outputs": "V", "denominator_grads": "", "backward_qk": "F", "backward_v": "V"}
"""The dimensions whose blocks are programs of their own. A program goes through the blocks of the other."""

LARGEST_PADDING = 1.25
"""Upper bound of a padded size, relative to its size with the smallest blocks."""


def block_size(size: int, largest: int) -> int:
    """Return the largest power of two, from 16 to `largest`, that divides a size with little padding."""
    block, least = largest, triton.cdiv(size, 16) * 16
    while block > 16 and triton.cdiv(size, block) * block > LARGEST_PADDING * least:
        block //= 2
    return block


class Launch(NamedTuple):
    """How a kernel is launched."""

    blocks: int
    """The number of programs that share a tile or a segment."""
    options: dict[str, int]


def launch_of(kernel: str, features: int, values: int, dtype: torch.dtype) -> Launch:
    """Return how a kernel is launched for a state (features, values)."""
    choice, blocks = CHOICES[kernel][dtype.itemsize], 1
    block_f, block_v = block_size(features, choice.features), block_size(values, choice.values)
    if "F" in DIVIDED[kernel]:
        blocks *= triton.cdiv(features, block_f)
    if "V" in DIVIDED[kernel]:
        blocks *= triton.cdiv(values, block_v)
    stages = {"num_warps": choice.num_warps, "num_stages": choice.num_stages}
    return Launch(blocks, {"BLOCK_F": block_f, "BLOCK_V": block_v, **stages})
