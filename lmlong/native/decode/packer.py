"""Addresses of the weights of a model, for native code that reads them in place."""

from enum import IntEnum
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from lmlong.native.decode import structures
from lmlong.native.decode.structures import Dtype
from lmlong.native.feature_maps import FeatureMap
from lmlong.native.spec import ModelReader, NoNativeForm

DTYPES = {torch.float32: Dtype.FLOAT32, torch.bfloat16: Dtype.BFLOAT16}


class Packer(ModelReader):
    """The weights of a model as addresses, which stay in memory as long as this object."""

    def __init__(self, model: nn.Module):
        super().__init__(model)
        self.matrices: list[Tensor] = []
        """Weight matrices, in the order in which a token needs them."""
        self._held: list[Tensor] = []
        self.epsilon = 0.0
        """The epsilon of all norms."""

    def features(self, feature_map: Any) -> structures.FeatureMapWeights:
        """Return the weights of a feature map."""
        spec = self.open(feature_map)
        number = number_of(feature_map, FeatureMap, spec.kind)
        packed = structures.FeatureMapWeights(map=number, size=feature_map.features)
        packed.inner = spec.options.get("inner", 0)
        for name in ("query_projection", "key_projection", "constants"):
            if spec.weights.get(name) is not None:
                setattr(packed, name, self.floats(feature_map, spec.weights[name]))
        return packed

    def gate(self, module: Any, activation: str, *shape: int, low_rank: bool = False) -> structures.Gate:
        """Return a gate for each head (H,), or for each feature of it (H, F)."""
        spec = self.open(module, "gate")
        declared, bias, down = spec.options["activation"], spec.weights["bias"], spec.weights["down"]
        assert bias is not None
        if (declared, len(bias)) != (activation, prod(shape)):
            expected = f"only a {activation} gate of {prod(shape)} outputs"
            raise NoNativeForm(module, f"is a {declared} gate of {len(bias)} outputs; {expected} is supported here")
        if down is not None and not low_rank:
            raise NoNativeForm(module, "is a low-rank gate, which native code does not support here")
        return structures.Gate(self.floats(module, spec.weights["weight"]), self.floats(module, bias))

    def forgetting(
        self, attention: Any, log_decay: Tensor | None, module: nn.Module | None, features: int = 0
    ) -> structures.Forgetting:
        """Return the decay of a recurrence: a fixed one, a gate for each head, or a gate for each of `features`."""
        packed = structures.Forgetting()
        if log_decay is not None:
            packed.log_decay = self.floats(attention, log_decay)
        if module is not None:
            down = self.open(module, "gate").weights["down"]
            if down is None or not features:
                packed.gate = self.gate(module, "log_sigmoid", attention.heads)
            else:
                packed.gate = self.gate(module, "log_sigmoid", attention.heads, features, low_rank=True)
                packed.gate_down, packed.rank = self.floats(module, down), len(down)
        return packed

    def norm(self, module: Any) -> int:
        spec = self.open(module, "rms_norm")
        if spec.options["epsilon"] != self.epsilon:
            raise NoNativeForm(module, "has another epsilon than the last norm; native code supports one for all norms")
        return self.floats(module, spec.weights["weight"])

    def matrix(self, module: Any) -> structures.Matrix:
        spec = self.open(module, "matrix")
        weight, group_format = spec.weights["weight"], spec.options.get("format")
        assert isinstance(weight, Tensor)
        self.matrices.append(weight)
        if group_format is not None:
            shape = spec.options["outputs"], spec.options["inputs"]
            return structures.Matrix(self.address(weight), Dtype[group_format.upper()], *shape)
        if weight.dtype not in DTYPES:
            raise NoNativeForm(module, f"its weight is in {weight.dtype}, which native code does not support")
        return structures.Matrix(self.address(weight), DTYPES[weight.dtype], *weight.shape)

    def floats(self, module: nn.Module, x: Tensor | None, transposed: bool = False) -> int:
        assert x is not None
        if x.dtype != torch.float32:
            raise NoNativeForm(module, f"its weights are in {x.dtype}; native code computes in float32")
        return self.address(x.mT if transposed else x)

    def address(self, x: Tensor) -> int:
        self._held.append(x.detach().contiguous())
        return self._held[-1].data_ptr()


def number_of(module: nn.Module, known: type[IntEnum], name: str) -> IntEnum:
    """Return the member of a C++ enumeration by its name in a recipe."""
    if name.upper() not in known.__members__:
        raise NoNativeForm(module, f"is of kind {name}, which native code does not support")
    return known[name.upper()]
