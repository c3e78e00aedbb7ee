"""Linear attention in the native decode step."""

import ctypes
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import nn

from lmlong.attention.linear.naive import MIN_DENOMINATOR, LinearState
from lmlong.native.decode.kind import DecodeKind, Packer
from lmlong.native.decode.structures import FeatureMapWeights, Forgetting, ints, pointers, structure


class LinearDecode(DecodeKind[LinearState]):
    name = "LinearAttention"
    header = Path(__file__).with_suffix(".h")
    weights = structure("LinearAttention::Weights", ("features", FeatureMapWeights), ("forgetting", Forgetting))
    state = structure("LinearAttention::State", *pointers(*LinearState._fields), *ints("float64"))
    takes_float64 = True
    constants = MappingProxyType({"MIN_DENOMINATOR": MIN_DENOMINATOR})

    def pack(self, packer: Packer, attention: Any, gates: Mapping[str, nn.Module]) -> ctypes.Structure:
        spec = packer.open(attention, "linear")
        features = packer.features(spec.parts["feature_map"])
        gate = gates.get("log_decay")
        return self.weights(features, packer.forgetting(attention, spec.weights["log_decay"], gate, features.size))


DECODE = LinearDecode()
