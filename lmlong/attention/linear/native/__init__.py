"""The scan of linear attention in C++, compiled for this machine's processor at its first use."""

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from lmlong.attention.favor import Favor
from lmlong.attention.feature_maps import RMS_EPS, Elu, FeatureMap, Relu
from lmlong.attention.linear.chunk import ChunkKernel
from lmlong.attention.linear.naive import MIN_DENOMINATOR
from lmlong.attention.native_kernel import PADDED_TO, NativeKernel, load_scan, scan_code
from lmlong.native.build import NativeLibrary
from lmlong.native.decode.structures import FeatureMap as NativeMap
from lmlong.native.source import NativeCode

CODE = Path(__file__).parent

FUSED: dict[type, NativeMap] = {Elu: NativeMap.ELU, Relu: NativeMap.RELU}


def code() -> NativeCode:
    return scan_code(CODE, {"MIN_DENOMINATOR": MIN_DENOMINATOR, "FAVOR_EPS": RMS_EPS}, has_z=True)


@cache
def library() -> NativeLibrary | None:
    return load_scan(code(), "linear attention")


class NativeLinear(NativeKernel):
    """Computes a span of linear attention, including the features of `elu`, `relu` and FAVOR+."""

    normalizes = True
    by_torch = ChunkKernel

    def library(self) -> ctypes.CDLL | None:
        return library()

    def mapped(self, features: FeatureMap) -> NativeKernel:
        if type(features) is Favor:
            return NativeFavor(features)
        return NativeLinear(FUSED.get(type(features)))


class NativeFavor(NativeLinear):
    """Computes a span of linear attention with FAVOR+ features."""

    @torch.no_grad()
    def __init__(self, features: Favor):
        super().__init__(NativeMap.FAVOR)
        self.features = features
        rows = features.projection.float()
        if features.form == "hyperbolic":
            rows = torch.cat([rows, -rows], dim=1)
        rows = pad(rows, (0, -rows.shape[2] % PADDED_TO, 0, -rows.shape[1] % PADDED_TO))
        constants = features.native_constants().float()
        weights = {"projection": rows, "projection_T": rows.mT, "favor_constants": constants}
        self.weights = {name: x.contiguous() for name, x in weights.items()}
        """The weights, by the job fields that take them."""

    @torch.no_grad()
    def add_weight_grads(self, dscale: Tensor, dweights: list[Tensor]) -> None:
        favor = self.features
        share = favor.raw_gain.float().sigmoid()
        dweights[0] += dscale.sum(0) * favor.projection.shape[-1] ** -0.25 * favor.largest_gain * share * (1 - share)
