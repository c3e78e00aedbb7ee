"""Weight matrices in groups of integers: `int4` with a scale and a minimum for each group, `int8` with a scale.

A group is GROUP consecutive inputs of an output. These are the grids of Q4_1 and Q8_0 in GGUF, so weights that are on
one of them already stay as they are.

N outputs, K inputs, G groups.
"""

from typing import Literal, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

GROUP = 32
"""Inputs of a group. The last group of an output is padded with zeros."""

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


def quantized(weight: Tensor, group_format: GroupFormat) -> GroupedWeight:
    """Return the codes of a matrix (N, K), rounded to the nearest. No gradients flow."""
    inputs, weight = weight.shape[1], weight.detach().float()
    groups = pad(weight, (0, -inputs % GROUP)).view(len(weight), -1, GROUP)
    if group_format == "int8":
        scales = (groups.abs().amax(-1) / LARGEST_CODE["int8"]).half()
        codes = (groups / _divisor(scales)).round().clamp(-LARGEST_CODE["int8"], LARGEST_CODE["int8"])
        return GroupedWeight(codes.to(torch.int8), scales, None, inputs)
    low, high = groups.aminmax(dim=-1)
    scales, minimums = ((high - low) / LARGEST_CODE["int4"]).half(), low.half()
    codes = ((groups - minimums[..., None].float()) / _divisor(scales)).round().clamp(0, LARGEST_CODE["int4"])
    return GroupedWeight(codes.to(torch.uint8), scales, minimums, inputs)


def _divisor(scales: Tensor) -> Tensor:
    """Return the scales (N, G, 1) in float32, with 1 for 0."""
    return scales.where(scales != 0, 1)[..., None].float()
