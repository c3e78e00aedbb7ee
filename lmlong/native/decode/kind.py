"""Native decoding of a kind of attention. Each kind subclasses `DecodeKind` beside its decode.h."""

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from lmlong.native.decode.packer import Packer

State = TypeVar("State", bound=tuple[Any, ...])


class DecodeKind(ABC, Generic[State]):
    """The C++ code of a kind of attention, its weights and its states.

    The methods support states of constant size that are flat tuples of tensors. Other kinds override them. They do not
    recurse over nested tuples, which would be slow for each layer at each token.
    """

    name: str
    """Name of its struct in C++, which has the structs Weights and State (mixer.h)."""

    header: Path
    """Its decode.h, in attention/<kind>."""

    weights: type[ctypes.Structure]
    state: type[ctypes.Structure]

    constants: Mapping[str, float] = MappingProxyType({})
    """Constants that its C++ code uses, floats and integers, by name."""

    takes_float64 = False
    """Whether it computes in float64 if its state is in float64. The last field of State is then an Int: 1 for float64,
    else 0."""

    takes_groups = False
    """Whether a step takes the query heads that share keys and values together."""

    grows = False
    """Whether the state grows with each token."""

    @property
    def headers(self) -> Mapping[str, Path]:
        """Its headers by their include names, such as linear/decode.h."""
        return {f"{self.header.parent.name}/{self.header.name}": self.header}

    @abstractmethod
    def pack(self, packer: Packer, attention: Any, gates: Mapping[str, nn.Module]) -> ctypes.Structure:
        """Return the weights of an attention of the class that this is the kind of (`Packer.known`) and of its gates.
        `gates` maps the names of the inputs that they compute to modules."""

    def fields(self, state: State) -> Sequence[int]:
        """Return the fields of the C++ State."""
        fields = [x.data_ptr() for x in state]
        if self.takes_float64:
            fields.append(state[0].dtype is torch.float64)
        return fields

    def as_native(self, state: State) -> State:
        """Return the state in the dtypes of the C++ State, each tensor contiguous."""
        if self.takes_float64 and state[0].dtype is torch.float64:
            return type(state)(*(x.double().contiguous() for x in state))
        return type(state)(*map(native, state))

    def each_written(self, change: Callable[[Tensor], Tensor], state: State) -> State:
        """Return the state with `change` applied to each tensor that a step writes to."""
        return type(state)(*map(change, state))

    def empty_after(self, state: State) -> State:
        """Return tensors for the state after a token."""
        return self.each_written(torch.empty_like, state)

    def with_room(self, state: State, full: bool) -> State:
        """Return the state after a step, with room for the next token. `full`: the step reports that a state of
        constant size, of any row and layer, has no room."""
        return state


def native(x: Tensor) -> Tensor:
    """Return a contiguous tensor, with floating-point numbers in float32."""
    if x.dtype is torch.float32 and x.is_contiguous():  # faster than the calls below
        return x
    return (x.float() if x.is_floating_point() else x).contiguous()
