"""The scan of the delta rule in C++, compiled for this machine's processor at its first use."""

import ctypes
from functools import cache
from pathlib import Path

from lmlong.attention.delta.chunk import ChunkKernel
from lmlong.attention.delta.naive import TINY, Silu, UnitFeatures
from lmlong.attention.feature_maps import Elu, FeatureMap, Relu
from lmlong.attention.native_kernel import NativeKernel, load_scan, scan_code
from lmlong.native.build import NativeLibrary
from lmlong.native.decode.structures import FeatureMap as NativeMap
from lmlong.native.source import NativeCode

CODE = Path(__file__).parent

INNER = {Silu: NativeMap.SILU, Elu: NativeMap.ELU, Relu: NativeMap.RELU}
"""The maps whose features are scaled to length one within the scan."""


def code() -> NativeCode:
    return scan_code(CODE, {"UNIT_TINY": TINY}, has_z=False)


@cache
def library() -> NativeLibrary | None:
    return load_scan(code(), "the delta rule")


class NativeDelta(NativeKernel):
    """Computes a span of the delta rule."""

    by_torch = ChunkKernel

    def library(self) -> ctypes.CDLL | None:
        return library()

    def mapped(self, features: FeatureMap) -> NativeKernel:
        return NativeDelta(INNER.get(type(features.inner)) if type(features) is UnitFeatures else None)
