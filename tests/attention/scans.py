"""The scan of a kernel, called alone.

B batch, H heads, T time, F features, V value dim.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lmlong.attention.feature_maps import FeatureMap
from lmlong.attention.scan import Kernel, Scan


class Identity(FeatureMap):
    """The map of queries and keys that are features already."""

    def __init__(self) -> None:
        super().__init__(0)

    def query(self, q: Tensor) -> Tensor:
        return q


class ScanInputs(NamedTuple):
    q: Tensor  # (B, H, T, ...)
    k: Tensor  # (B, H, T, ...)
    v: Tensor  # (B, H, T, V)
    document_starts: Tensor | None = None  # (B, T)
    log_decay: Tensor | None = None  # (B, H, T), or (B, H, T, F)
    beta: Tensor | None = None  # (B, H, T)


def delta_scan(kernel: Kernel, features: FeatureMap, x: ScanInputs, S: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs and the state after."""
    if (done := kernel.operation(features, S, *x[:5])) is not None:
        return done
    return Scan.apply(kernel, features, torch.is_grad_enabled(), S, *x, *features.parameters())[:2]


def linear_scan(
    kernel: Kernel, features: FeatureMap, x: ScanInputs, S: Tensor, z: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs, S and z."""
    y, state = delta_scan(kernel, features, x, torch.cat([S, z[..., None]], dim=-1))
    return y, state[..., :-1].contiguous(), state[..., -1].contiguous()
