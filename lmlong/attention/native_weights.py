"""Feature maps and gates in the structures of the native decode step.

H heads, F features.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

from torch import nn

from lmlong.attention.delta.naive import Identity, Silu
from lmlong.attention.favor import Favor
from lmlong.attention.feature_maps import Cosine, Elu, FeatureMap, Hedgehog, Relu, Softmax, Taylor
from lmlong.attention.inputs import GateProjection
from lmlong.attention.recurrence import Recurrence
from lmlong.native.decode import structures
from lmlong.native.decode.packer import NoNativeForm, Packer
from lmlong.native.decode.structures import FeatureMap as NativeMap

NATIVE_MAPS: dict[type[FeatureMap], NativeMap] = {
    Elu: NativeMap.ELU,
    Relu: NativeMap.RELU,
    Cosine: NativeMap.COSINE,
    Softmax: NativeMap.SOFTMAX,
    Taylor: NativeMap.TAYLOR,
    Favor: NativeMap.FAVOR,
    Silu: NativeMap.SILU,
    Identity: NativeMap.IDENTITY,
    Hedgehog: NativeMap.HEDGEHOG,
}


def pack_features(packer: Packer, feature_map: FeatureMap) -> structures.FeatureMapWeights:
    """Return the weights of a feature map."""
    packer.known(feature_map, *NATIVE_MAPS)
    packed = structures.FeatureMapWeights(map=NATIVE_MAPS[type(feature_map)], size=feature_map.features)
    if isinstance(feature_map, Favor):
        packed.inner = feature_map.projection.shape[1]
        packed.query_projection = packer.floats(feature_map, feature_map.projection)
        packed.constants = packer.floats(feature_map, feature_map.native_constants())
        packer.mark_packed(feature_map.raw_gain)
    if isinstance(feature_map, Taylor):
        packed.inner = feature_map.inner
    if isinstance(feature_map, Taylor | Hedgehog):
        for name in ("query_projection", "key_projection"):
            weight = getattr(feature_map, name)
            if weight is not None:
                setattr(packed, name, packer.floats(feature_map, weight, transposed=True))
    return packed


def pack_gate(
    packer: Packer, module: nn.Module, activations: Sequence[str], *shape: int, low_rank: bool = False
) -> structures.Gate:
    """Return a gate for each head (H,), or for each feature of it (H, F), with one of these activations."""
    projection = packer.known(module, GateProjection)
    own, outputs = projection.gate.activation, len(projection.weight)
    if own not in activations or outputs != prod(shape):
        expected = f"only a {' or '.join(activations)} gate of {prod(shape)} outputs"
        raise NoNativeForm(module, f"is a {own} gate of {outputs} outputs; {expected} is supported here")
    if projection.down is not None and not low_rank:
        raise NoNativeForm(module, "is a low-rank gate, which native code does not support here")
    bias = None if projection.bias is None else packer.floats(module, projection.bias)
    return structures.Gate(packer.floats(module, projection.weight), bias)


def pack_forgetting(
    packer: Packer, attention: Recurrence[Any], module: nn.Module | None, features: int = 0
) -> structures.Forgetting:
    """Return the decay of a recurrence: a fixed one, a gate for each head, or a gate for each of `features`."""
    packed = structures.Forgetting()
    if attention.log_decay is not None:
        packed.log_decay = packer.floats(attention, attention.log_decay)
    if module is not None:
        projection = packer.known(module, GateProjection)
        down = projection.down
        if down is None or not features:
            packed.gate = pack_gate(packer, module, ("log_sigmoid", "softplus"), attention.heads)
            if projection.log_rate is not None:
                packed.log_rate = packer.floats(module, projection.log_rate)
        else:
            packed.gate = pack_gate(packer, module, ("log_sigmoid",), attention.heads, features, low_rank=True)
            packed.gate_down, packed.rank = packer.floats(module, down), len(down)
    return packed
