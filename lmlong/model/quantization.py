"""Weight matrices in groups of integers: `int4` with a scale and a minimum for each group, `int8` with a scale.

A group is GROUP consecutive inputs of an output. These are the grids of Q4_1 and Q8_0 in GGUF, so weights that are on
one of them already stay as they are. The scale and minimum of an `int4` group are fitted to its weights: its smallest
and largest may lie outside the codes if the others gain more. Both ends of the codes are used, so that the weights of a
fitted group are fitted to the same codes again.

N outputs, K inputs, G groups, R groups of several outputs.
"""

from typing import Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

GROUP = 32
"""Inputs of a group. If the last group of an output has fewer, its weights are repeated, for inputs of 0."""

GroupFormat = Literal["int4", "int8"]
WeightFormat = Literal["bf16", "int8", "int4"]
"""The formats of weight matrices for inference, beside float32."""
Weights = Literal["32", WeightFormat]
"""The same, and float32."""

Format = TypeVar("Format", WeightFormat, GroupFormat)


def output_format(weight_format: Format) -> Format:
    """Return the format of the output matrix of a model whose other matrices have a format."""
    return "int8" if weight_format == "int4" else weight_format


LARGEST_CODE: dict[GroupFormat, int] = {"int4": 15, "int8": 127}

FIRST_RANGES = (1.0, 0.9, 0.8)
"""Shares of the range of a group that its `int4` codes cover before they are refitted."""

REFITS = 2
"""How often a scale and a minimum are fitted to the weights of the codes, and codes to these."""

TINY = 1e-9
"""Stands for the spread of codes that are all the same."""

GROUPS_AT_ONCE, GROUPS_ON_GPU = 8192, 1 << 18
"""Groups that are fitted together: few enough for the cache of a processor, many enough for a GPU."""


class GroupedWeight(NamedTuple):
    """A matrix (N, K) as codes: scale * code, plus the minimum of the group if there are minimums."""

    codes: Tensor  # (N, G, GROUP), uint8 from 0 to 15 or int8 from -127 to 127
    scales: Tensor  # (N, G) float16
    minimums: Tensor | None  # (N, G) float16; None in int8
    inputs: int

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the matrix (N, K)."""
        weight = self.codes.to(dtype) * self.scales[..., None].to(dtype)
        if self.minimums is not None:
            weight = weight + self.minimums[..., None].to(dtype)
        return weight.flatten(1)[:, : self.inputs]


def quantized(weight: Tensor, group_format: GroupFormat, may_wait: bool = True) -> GroupedWeight:
    """Return the codes of a matrix (N, K). No gradients flow. `may_wait`: whether to find out if weights are on the
    grid already and need no fit, for which the program waits for a GPU."""
    inputs, weight = weight.shape[1], weight.detach().float()
    last = weight[:, inputs - inputs % GROUP :]
    groups = torch.cat([weight, *[last] * GROUP], dim=1)[:, : inputs + -inputs % GROUP].view(len(weight), -1, GROUP)
    if group_format == "int8":
        scales = _int8_scales(groups.abs().amax(-1))
        divisors = scales.where(scales != 0, 1)[..., None].float()
        codes = (groups / divisors).round().clamp(-LARGEST_CODE["int8"], LARGEST_CODE["int8"])
        return GroupedWeight(codes.to(torch.int8), scales, None, inputs)
    parts = groups.flatten(0, 1).split(GROUPS_AT_ONCE if groups.device.type == "cpu" else GROUPS_ON_GPU)
    fits = [_fitted(part, may_wait) for part in parts]
    codes, scales, minimums, _ = map(torch.cat, zip(*fits, strict=True))
    shape = groups.shape[:2]
    return GroupedWeight(codes.to(torch.uint8).view_as(groups), scales.view(shape), minimums.view(shape), inputs)


def _int8_scales(largest: Tensor) -> Tensor:
    """Return the scales in float16 of groups by their largest weights. Below 2^-14, float16 has fewer bits: where the
    nearest scale would put the largest weight more than half a step outside the codes, take the next larger one."""
    scales = (largest / LARGEST_CODE["int8"]).half()
    too_small = (LARGEST_CODE["int8"] + 0.5) * scales.float() < largest
    return (scales.view(torch.int16) + too_small.short()).view(torch.float16)


class Fit(NamedTuple):
    """Groups as codes, and how far off they are."""

    codes: Tensor  # (R, GROUP) float32
    scales: Tensor  # (R, 1) float16
    minimums: Tensor  # (R, 1) float16
    errors: Tensor  # (R, 1) sum of squares


def _fitted(groups: Tensor, may_wait: bool) -> Fit:
    """Return the best of several fits of groups (R, GROUP)."""
    low, high = groups.aminmax(dim=-1, keepdim=True)
    best = _rounded(groups, (high - low) / LARGEST_CODE["int4"], low)
    if may_wait and not best.errors.any():
        return best
    for share in FIRST_RANGES:
        fit = _rounded(groups, share * (high - low) / LARGEST_CODE["int4"], low + (1 - share) / 2 * (high - low))
        for _ in range(REFITS):
            fit = _rounded(groups, *_least_squares(groups, fit.codes))
        ends_used = (fit.codes.amax(-1, keepdim=True) - fit.codes.amin(-1, keepdim=True)) == LARGEST_CODE["int4"]
        better = ends_used & (fit.errors < best.errors)
        best = Fit(*(torch.where(better, *pair) for pair in zip(fit, best, strict=True)))
    return best


def _rounded(groups: Tensor, scales: Tensor, minimums: Tensor) -> Fit:
    """Return groups rounded to the nearest codes."""
    scales, minimums = scales.half(), minimums.half()
    scale, minimum = scales.float(), minimums.float()
    codes = ((groups - minimum) / scale.where(scale != 0, 1)).round().clamp(0, LARGEST_CODE["int4"])
    errors = (codes * scale + minimum - groups).square().sum(-1, keepdim=True)
    return Fit(codes, scales, minimums, errors)


def _least_squares(groups: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales and minimums (R, 1) with the least squared errors for codes (R, GROUP)."""
    middle = codes.mean(-1, keepdim=True)
    off = codes - middle
    scales = (off * groups).sum(-1, keepdim=True) / off.square().sum(-1, keepdim=True).clamp_min(TINY)
    return scales, groups.mean(-1, keepdim=True) - scales * middle
