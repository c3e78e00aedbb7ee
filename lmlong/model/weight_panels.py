"""Quantized matrices in the order in which native code reads them (native/grouped.h), and inputs rounded as it does.

N outputs, K inputs, P panels, G groups.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from lmlong.model.quantization import GROUP, LARGEST_CODE, GroupedWeight, GroupFormat
from lmlong.native.grouped.kernel import PANEL

WORD = 4
"""Inputs of an output that are stored together."""


def pack(weight: GroupedWeight) -> Tensor:
    """Return the bytes (P, G, record) of a matrix: for each panel of outputs and group of inputs the scales, the
    minimums, and the codes."""
    outputs, groups, _ = weight.codes.shape
    codes = pad(weight.codes, (0, 0, 0, 0, 0, -outputs % PANEL)).view(-1, PANEL, groups, GROUP // WORD, WORD)
    scales = [x for x in (weight.scales, weight.minimums) if x is not None]
    heads = [
        pad(x, (0, 0, 0, -outputs % PANEL)).view(-1, PANEL, groups).mT.contiguous().view(torch.uint8) for x in scales
    ]
    if weight.minimums is not None:
        codes = codes[..., 0::2, :] | codes[..., 1::2, :] << 4
    bytes_of_codes = codes.permute(0, 2, 3, 1, 4).contiguous().view(torch.uint8).flatten(2)
    return torch.cat([*heads, bytes_of_codes], dim=-1)


def unpack(panels: Tensor, outputs: int, inputs: int, group_format: GroupFormat) -> GroupedWeight:
    """Return the matrix (N, K) that `pack` packed."""
    size = PANEL * 2
    scales = panels[..., :size].contiguous().view(torch.float16).mT.flatten(0, 1)[:outputs]
    minimums = None
    if group_format == "int4":
        minimums = panels[..., size : 2 * size].contiguous().view(torch.float16).mT.flatten(0, 1)[:outputs]
        size *= 2
    words = panels[..., size:].unflatten(-1, (-1, PANEL, WORD))
    if group_format == "int4":
        words = torch.stack([words & LARGEST_CODE["int4"], words >> 4], dim=3).flatten(2, 3)
    codes = words.permute(0, 3, 1, 2, 4).flatten(3).flatten(0, 1)[:outputs]
    return GroupedWeight(
        codes if minimums is not None else codes.contiguous().view(torch.int8), scales, minimums, inputs
    )


def rounded_activations(x: Tensor) -> Tensor:
    """Return vectors (..., K) rounded to int8 in groups, to the nearest and halves to even. A group with a number that
    is not finite becomes NaN. Gradients pass through the rounding."""
    groups = pad(x.detach(), (0, -x.shape[-1] % GROUP)).unflatten(-1, (-1, GROUP))
    largest = groups.abs().amax(-1, keepdim=True)
    per_step = LARGEST_CODE["int8"] / largest
    scale = torch.where(per_step.isinf(), 0, largest / LARGEST_CODE["int8"])
    codes = torch.where(per_step.isinf(), 0, groups * per_step).round()
    rounded = (codes * torch.where(largest.isfinite(), scale, torch.nan)).flatten(-2)[..., : x.shape[-1]]
    return x + (rounded - x).detach() if x.requires_grad else rounded
