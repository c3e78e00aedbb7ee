"""The scan of linear attention in C++, compiled for this machine's processor when it is first needed."""

from functools import cache
from pathlib import Path

from torch import Tensor

from lmlong.attention.feature_maps import Elu, Relu
from lmlong.attention.linear import autograd, chunk
from lmlong.attention.native_kernel import Library, NativeKernel, as_native, load_library
from lmlong.attention.scan import IdentityFeatures, QKFeatures, ScanInputs
from lmlong.native.feature_maps import FeatureMap

FUSED = {IdentityFeatures: FeatureMap.IDENTITY, Elu: FeatureMap.ELU, Relu: FeatureMap.RELU}

CODE = Path(__file__).parent


@cache
def library() -> Library | None:
    return load_library(CODE, "linear attention", {"MIN_DENOMINATOR": autograd.MIN_DENOMINATOR})


def scan(features: QKFeatures, inputs: ScanInputs, S: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Run the scan by native code, or by `chunk.scan` for other devices and dtypes and without a compiler."""
    if (native := as_native(inputs, S)) and (compiled := library()):
        kernel = NativeKernel(compiled, lambda features: FUSED.get(type(features)), has_denominators=True)
        return autograd.scan(kernel, features, native, S, z)
    return chunk.scan(features, inputs, S, z)
