"""The scan of the delta rule in C++, compiled for this machine's processor when it is first needed."""

from functools import cache
from pathlib import Path

from torch import Tensor

from lmlong.attention import scan as spans
from lmlong.attention.delta import chunk
from lmlong.attention.delta.features import TINY, Silu, UnitFeatures
from lmlong.attention.feature_maps import Elu, Relu
from lmlong.attention.native_kernel import FusedFeatures, Library, NativeKernel, as_native, load_library
from lmlong.attention.scan import IdentityFeatures, QKFeatures, ScanInputs
from lmlong.native.feature_maps import FeatureMap

INNER = {Silu: FeatureMap.SILU, Elu: FeatureMap.ELU, Relu: FeatureMap.RELU}

CODE = Path(__file__).parent


@cache
def library() -> Library | None:
    return load_library(CODE, "the delta rule", {"UNIT_TINY": TINY})


def scan(features: QKFeatures, inputs: ScanInputs, S: Tensor) -> tuple[Tensor, Tensor]:
    """Run the scan by native code, or by `chunk.scan` for other devices and dtypes and without a compiler."""
    if (native := as_native(inputs, S)) and (compiled := library()):
        return spans.scan(NativeKernel(compiled, _fused(features)), features, native, S)
    return chunk.scan(features, inputs, S)


def _fused(features: QKFeatures) -> FusedFeatures | None:
    """Return a map whose features of length one native code computes."""
    if type(features) is IdentityFeatures:
        return FusedFeatures(FeatureMap.IDENTITY)
    known = INNER.get(type(features.inner)) if type(features) is UnitFeatures else None
    return None if known is None else FusedFeatures(known)
