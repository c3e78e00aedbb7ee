"""What native code must know of a kind of attention to decode it. Each kind defines its own, beside its decode.h."""

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from lmlong.native.decode.packer import Packer

State = TypeVar("State", bound=tuple[Any, ...])


class DecodeKind(ABC, Generic[State]):
    """How native code decodes a kind of attention: its C++, its weights and its states.

    The methods fit states of constant size whose tensors are float32; a kind with others overrides them.
    """

    name: str
    """Name of its struct in C++, which has the structs Weights and State (mixer.h)."""

    header: Path
    """Its decode.h, in attention/<kind>/native."""

    weights: type[ctypes.Structure]
    state: type[ctypes.Structure]

    inputs: Collection[tuple[str, ...]] = ((),)
    """The inputs that its attention may ask for, in their order."""

    constants: Mapping[str, float] = MappingProxyType({})
    integers: Mapping[str, int] = MappingProxyType({})

    grows = False
    """Whether each token needs a larger state."""

    @property
    def headers(self) -> Mapping[str, Path]:
        """The headers of its C++ by the names by which they are included, such as linear/decode.h."""
        return {f"{self.header.parents[1].name}/{self.header.name}": self.header}

    @abstractmethod
    def pack(self, packer: Packer, attention: Any, gates: Mapping[str, nn.Module]) -> ctypes.Structure:
        """Return the weights of an attention and of its gates, by the names of the inputs that they make."""

    @abstractmethod
    def fields(self, state: State) -> Sequence[int]:
        """Return the fields of the C++ State. Called for each layer at each token: written out rather than looped."""

    def as_native(self, state: State) -> State:
        """Return the state in the dtypes of the C++ State, each tensor contiguous."""
        return type(state)(*map(floats, state))

    def each_written(self, change: Callable[[Tensor], Tensor], state: State) -> State:
        """Return the state with `change` applied to each tensor that a step writes to."""
        return type(state)(*map(change, state))

    def empty_after(self, state: State, by_row: bool) -> State:
        """Return tensors for the state after a token; `by_row`: a row may not read the token and keeps its state."""
        return self.each_written(torch.clone if by_row else torch.empty_like, state)

    def with_room(self, state: State, full: bool) -> State:
        """Return the state after a step with room for the next token; `full`: the step reports that a state of constant
        size has none."""
        return state

    def is_full(self, state: State) -> bool:
        """Whether a state of constant size has no room for the next token."""
        return False


def structure(name: str, *fields: tuple[str, Any]) -> type[ctypes.Structure]:
    """Return a structure by its name in C++."""
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def floats(x: Tensor) -> Tensor:
    return x if x.dtype is torch.float32 and x.is_contiguous() else x.float().contiguous()


def integers(x: Tensor, dtype: torch.dtype = torch.long) -> Tensor:
    return x if x.dtype is dtype and x.is_contiguous() else x.to(dtype).contiguous()  # asked first, which is quicker
