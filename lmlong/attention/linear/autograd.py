"""The scan of linear attention as an autograd function: S and z pass through it as one tensor, z the last column of S.

B batch, H heads, T time, F features, V value dim.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lmlong.attention import scan as spans
from lmlong.attention.scan import QKFeatures, ScanInputs, ScanOutputs, SpanKernel

MIN_DENOMINATOR = 1e-30
"""Lower bound of denominators, so that nothing is ever divided by 0."""

Scan = Callable[[QKFeatures, ScanInputs, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""The scan of one implementation: (features, inputs, S, z) -> outputs, S and z."""


def scan(
    kernel: SpanKernel, features: QKFeatures, inputs: ScanInputs, S: Tensor, z: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs (B, H, T, V), and the state after the last token."""
    y, state = spans.scan(kernel, features, inputs, torch.cat([S, z[..., None]], dim=-1))
    return y, state[..., :-1].contiguous(), state[..., -1].contiguous()


def scan_forward(
    kernel: SpanKernel, features: QKFeatures, inputs: ScanInputs, S: Tensor, z: Tensor
) -> tuple[ScanOutputs, Tensor, Tensor]:
    """Return outputs with their denominators, S and z."""
    outputs, state = spans.scan_forward(kernel, features, inputs, torch.cat([S, z[..., None]], dim=-1))
    return outputs, state[..., :-1].clone(), state[..., -1].clone()
