"""The delta rule in the native decode step."""

import ctypes
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import nn

from lmlong.attention.delta.features import TINY
from lmlong.attention.delta.naive import DeltaState
from lmlong.native.decode.kind import DecodeKind, Packer
from lmlong.native.decode.structures import FeatureMapWeights, Forgetting, Gate, ints, pointers, structure


class DeltaDecode(DecodeKind[DeltaState]):
    name = "DeltaAttention"
    header = Path(__file__).with_suffix(".h")
    weights = structure(
        "DeltaAttention::Weights", ("features", FeatureMapWeights), ("forgetting", Forgetting), ("beta", Gate)
    )
    state = structure("DeltaAttention::State", *pointers(*DeltaState._fields), *ints("float64"))
    takes_float64 = True
    constants = MappingProxyType({"UNIT_TINY": TINY})

    def pack(self, packer: Packer, attention: Any, gates: Mapping[str, nn.Module]) -> ctypes.Structure:
        spec = packer.open(attention, "delta")
        unit = packer.open(spec.parts["feature_map"], "unit")
        forgetting = packer.forgetting(attention, spec.weights["log_decay"], gates.get("log_decay"))
        beta = packer.gate(gates["beta"], "sigmoid", attention.heads)
        return self.weights(packer.features(unit.parts["inner"]), forgetting, beta)


DECODE = DeltaDecode()
