"""Addresses of the weights of a model, for native code that reads them in place.

Whatever a module declares that is not asked for here raises `NoNativeForm`: it would be left out in silence.
"""

from collections.abc import Collection
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor, nn

from lmlong.native.decode import structures
from lmlong.native.decode.structures import Dtype
from lmlong.native.feature_maps import FeatureMap
from lmlong.native.spec import NativeSpec, NoNativeForm, spec_of

DTYPES = {torch.float32: Dtype.FLOAT32, torch.bfloat16: Dtype.BFLOAT16, torch.int8: Dtype.INT8}


class Packer:
    """Weights as addresses, which stay in memory as long as this object."""

    def __init__(self) -> None:
        self.matrices: list[Tensor] = []
        """Weight matrices, in the order in which a token needs them."""
        self._held: list[Tensor] = []
        self._known: set[int] = set()
        self.epsilon = 0.0
        """That of all norms."""

    def knows(self, weight: Tensor) -> bool:
        """Whether a module that was opened has declared a weight."""
        return id(weight) in self._known

    def open(
        self,
        module: Any,
        kind: str,
        options: Collection[str] = (),
        weights: Collection[str] = (),
        parts: Collection[str] = (),
    ) -> NativeSpec:
        """Return what a module declares, which must be of this kind and have these options, weights and parts alone."""
        spec = spec_of(module)
        if spec.kind != kind:
            raise NoNativeForm(module, f"is of kind {spec.kind}, where native code knows {kind}")
        for found, wanted in ((spec.options, options), (spec.weights, weights), (spec.parts, parts)):
            if differing := sorted(set(found) ^ set(wanted)):
                raise NoNativeForm(module, f"native code and the module differ about {', '.join(differing)}")
        self._known.update(map(id, spec.weights.values()))
        return spec

    def features(self, module: Any) -> structures.Features:
        """Return a feature map."""
        kind = spec_of(module).kind
        packed = structures.Features(map=number_of(module, FeatureMap, kind))
        if kind == "taylor":
            weights = ("query_projection", "key_projection")
            spec = self.open(module, kind, ("features", "inner"), weights)
            packed.inner = spec.options["inner"]
            if spec.weights["query_projection"] is not None:
                packed.query_projection, packed.key_projection = (
                    self.floats(module, spec.weights[name], transposed=True) for name in weights
                )
        elif kind == "hedgehog":
            weights = ("query_projection", "key_projection")
            spec = self.open(module, kind, ("features",), weights)
            packed.query_projection, packed.key_projection = (
                self.floats(module, spec.weights[name], transposed=True) for name in weights
            )
        elif kind == "favor":
            spec = self.open(module, kind, ("features",), ("projection", "raw_gain", "constants"))
            packed.query_projection = self.floats(module, spec.weights["projection"])
            packed.favor_constants = self.floats(module, spec.weights["constants"])
            assert spec.weights["projection"] is not None
            packed.inner = spec.weights["projection"].shape[1]
        else:
            spec = self.open(module, kind, ("features",))
        packed.size = spec.options["features"]
        return packed

    def gate(self, module: Any, activation: str, heads: int) -> structures.Gate:
        """Return a gate for each head."""
        gate = self._open_gate(module, activation, (heads,))
        if gate.weights["down"] is not None:
            raise NoNativeForm(module, "native code has no such gate as a product of two matrices")
        return structures.Gate(*(self.floats(module, gate.weights[x]) for x in ("weight", "bias")))

    def forgetting(
        self, attention: Any, log_decay: Tensor | None, module: nn.Module | None, features: int | None = None
    ) -> structures.Forgetting:
        """Return the decay of a recurrence: a fixed one, a gate for each head, or a gate for each of `features`."""
        packed = structures.Forgetting()
        if log_decay is not None:
            packed.log_decay = self.floats(attention, log_decay)
        if module is None:
            return packed
        down = None if features is None else spec_of(module).weights["down"]
        if down is None:
            packed.gate = self.gate(module, "log_sigmoid", attention.heads)
            return packed
        assert features is not None
        gate = self._open_gate(module, "log_sigmoid", (attention.heads, features))
        packed.gate = structures.Gate(*(self.floats(module, gate.weights[x]) for x in ("weight", "bias")))
        packed.gate_down, packed.rank = self.floats(module, down), len(down)
        return packed

    def _open_gate(self, module: Any, activation: str, shape: tuple[int, ...]) -> NativeSpec:
        gate = self.open(module, "gate", ("activation", "shape"), ("down", "weight", "bias"))
        if gate.options != {"activation": activation, "shape": shape}:
            raise NoNativeForm(module, f"native code has no gate with {dict(gate.options)}")
        return gate

    def norm(self, module: Any) -> int:
        spec = self.open(module, "rms_norm", ("epsilon",), ("weight",))
        if spec.options["epsilon"] != self.epsilon:
            raise NoNativeForm(module, "has another epsilon than the last norm, and native code one for all")
        return self.floats(module, spec.weights["weight"])

    def matrix(self, module: Any) -> structures.Matrix:
        spec = spec_of(module)
        spec = self.open(module, "matrix", (), ("weight", "scales") if "scales" in spec.weights else ("weight",))
        weight, scales = spec.weights["weight"], spec.weights.get("scales")
        assert isinstance(weight, Tensor)
        if weight.dtype not in DTYPES:
            raise NoNativeForm(module, f"its weight is in {weight.dtype}")
        self.matrices.append(weight)
        packed_scales = None if scales is None else self.floats(module, scales)
        return structures.Matrix(self.address(weight), packed_scales, DTYPES[weight.dtype], *weight.shape)

    def floats(self, module: nn.Module, x: Tensor | None, transposed: bool = False) -> int:
        assert x is not None
        if x.dtype != torch.float32:
            raise NoNativeForm(module, f"its weights are in {x.dtype}, and native code computes in float32")
        return self.address(x.mT if transposed else x)

    def address(self, x: Tensor) -> int:
        self._held.append(x.detach().contiguous())
        return self._held[-1].data_ptr()


def number_of(module: nn.Module, known: type[IntEnum], name: str) -> IntEnum:
    """Return the number of a name in C++."""
    if name.upper() not in known.__members__:
        raise NoNativeForm(module, f"is of kind {name}, which native code does not know")
    return known[name.upper()]
