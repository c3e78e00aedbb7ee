"""The scan of linear attention in C++, compiled for this machine's processor when it is first needed."""

from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from lmlong.attention.favor import Favor
from lmlong.attention.feature_maps import RMS_EPS, Elu, Relu
from lmlong.attention.linear import autograd, chunk
from lmlong.attention.native_kernel import PADDED_TO, FusedFeatures, Library, NativeKernel, as_native, load_library
from lmlong.attention.scan import IdentityFeatures, QKFeatures, ScanInputs
from lmlong.native.feature_maps import FeatureMap

FUSED = {IdentityFeatures: FeatureMap.IDENTITY, Elu: FeatureMap.ELU, Relu: FeatureMap.RELU}

CODE = Path(__file__).parent


@cache
def library() -> Library | None:
    constants = {"MIN_DENOMINATOR": autograd.MIN_DENOMINATOR, "FAVOR_EPS": RMS_EPS}
    return load_library(CODE, "linear attention", constants)


def scan(features: QKFeatures, inputs: ScanInputs, S: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Run the scan by native code, or by `chunk.scan` for other devices and dtypes and without a compiler."""
    if (native := as_native(inputs, S)) and (compiled := library()):
        return autograd.scan(NativeKernel(compiled, _fused(features), True), features, native, S, z)
    return chunk.scan(features, inputs, S, z)


def _fused(features: QKFeatures) -> FusedFeatures | None:
    """Return a map that native code computes, with its weights."""
    if type(features) is Favor:
        return _fused_favor(features)
    known = FUSED.get(type(features))
    return None if known is None else FusedFeatures(known)


@torch.no_grad()
def _fused_favor(features: Favor) -> FusedFeatures:
    rows = features.projection.float()
    if features.form == "hyperbolic":
        rows = torch.cat([rows, -rows], dim=1)
    rows = pad(rows, (0, -rows.shape[2] % PADDED_TO, 0, -rows.shape[1] % PADDED_TO))
    constants = features.native_spec().weights["constants"]
    assert constants is not None
    weights = {"projection": rows, "projection_T": rows.mT, "favor_constants": constants.float()}

    @torch.no_grad()
    def add_grads(dscale: Tensor, into: list[Tensor]) -> None:
        share = features.raw_gain.float().sigmoid()
        into[0] += dscale.sum(0) * features.projection.shape[-1] ** -0.25 * features.largest_gain * share * (1 - share)

    return FusedFeatures(FeatureMap.FAVOR, {name: x.contiguous() for name, x in weights.items()}, add_grads)
