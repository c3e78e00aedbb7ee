"""A recurrence with a parallel window in the native decode step."""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lmlong.attention.parallel_window.state import ParallelState
from lmlong.attention.window.native.decode import DECODE as WINDOW
from lmlong.native.decode.kind import DecodeKind, Packer
from lmlong.native.decode.structures import Gate, structure


class ParallelWindowDecode(DecodeKind[ParallelState]):
    """`ParallelWindow` with one kind of recurrence."""

    header = Path(__file__).with_suffix(".h")

    def __init__(self, recurrence: DecodeKind[Any]):
        self.recurrence = recurrence
        self.name = f"ParallelWindow<{recurrence.name}>"
        self.weights = structure(
            f"{self.name}::Weights",
            ("recurrence", recurrence.weights),
            ("window", WINDOW.weights),
            ("share", Gate),
        )
        self.state = structure(f"{self.name}::State", ("recurrence", recurrence.state), ("window", WINDOW.state))

    @property
    def headers(self) -> Mapping[str, Path]:
        return {**self.recurrence.headers, **WINDOW.headers, **super().headers}

    def pack(self, packer: Packer, attention: Any, gates: Mapping[str, nn.Module]) -> ctypes.Structure:
        spec = packer.open(attention, "parallel_window")
        recurrence = self.recurrence.pack(packer, spec.parts["recurrence"], gates)
        window = WINDOW.pack(packer, spec.parts["window"], {})
        return self.weights(recurrence, window, packer.gate(gates["window_share"], "sigmoid", attention.heads))

    def fields(self, state: ParallelState) -> Sequence[int]:
        return *self.recurrence.fields(state.recurrence), *WINDOW.fields(state.window)

    def as_native(self, state: ParallelState) -> ParallelState:
        return ParallelState(self.recurrence.as_native(state.recurrence), WINDOW.as_native(state.window))

    def each_written(self, change: Callable[[Tensor], Tensor], state: ParallelState) -> ParallelState:
        recurrence = self.recurrence.each_written(change, state.recurrence)
        return ParallelState(recurrence, WINDOW.each_written(change, state.window))


@cache
def beside_window(recurrence: DecodeKind[Any]) -> ParallelWindowDecode:
    """Return the decode kind of a recurrence with a parallel window."""
    return ParallelWindowDecode(recurrence)
