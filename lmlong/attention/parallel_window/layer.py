"""A recurrence and a window in one layer: exact attention to near tokens, a state of constant size for the rest.

B batch, H heads, T time, K key dim, V value dim.
"""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lmlong import recipe
from lmlong.attention.base import CausalAttention
from lmlong.attention.inputs import NOTHING, Gate, Inputs, Rotated
from lmlong.attention.native_weights import pack_gate
from lmlong.attention.recurrence import Recurrence
from lmlong.attention.window.layer import WindowAttention, WindowEffect, WindowState
from lmlong.native.decode.kind import DecodeKind, Packer
from lmlong.native.decode.structures import Gate as GateWeights
from lmlong.native.decode.structures import structure

WINDOW = WindowAttention.native_decode


class ParallelState(NamedTuple):
    recurrence: Any
    window: WindowState


class ParallelEffect(NamedTuple):
    recurrence: Any
    window: WindowEffect


class ParallelWindowDecode(DecodeKind[ParallelState]):
    """`ParallelWindow` with one kind of recurrence."""

    header = Path(__file__).with_name("decode.h")

    def __init__(self, recurrence: DecodeKind[Any]):
        self.recurrence = recurrence
        self.name = f"ParallelWindow<{recurrence.name}>"
        self.weights = structure(
            f"{self.name}::Weights",
            ("recurrence", recurrence.weights),
            ("window", WINDOW.weights),
            ("share", GateWeights),
        )
        self.state = structure(f"{self.name}::State", ("recurrence", recurrence.state), ("window", WINDOW.state))

    @property
    def headers(self) -> Mapping[str, Path]:
        return {**self.recurrence.headers, **WINDOW.headers, **super().headers}

    def pack(self, packer: Packer, attention: Any, gates: Mapping[str, nn.Module]) -> ctypes.Structure:
        packer.known(attention, ParallelWindow)
        recurrence = self.recurrence.pack(packer, attention.recurrence, gates)
        window = WINDOW.pack(packer, attention.window, gates)
        return self.weights(recurrence, window, pack_gate(packer, gates["window_share"], "sigmoid", attention.heads))

    def fields(self, state: ParallelState) -> Sequence[int]:
        return *self.recurrence.fields(state.recurrence), *WINDOW.fields(state.window)

    def as_native(self, state: ParallelState) -> ParallelState:
        return ParallelState(self.recurrence.as_native(state.recurrence), WINDOW.as_native(state.window))

    def each_written(self, change: Callable[[Tensor], Tensor], state: ParallelState) -> ParallelState:
        recurrence = self.recurrence.each_written(change, state.recurrence)
        return ParallelState(recurrence, WINDOW.each_written(change, state.window))


decode_of = cache(ParallelWindowDecode)
"""The decode kind of a recurrence with a parallel window, one object for each recurrence."""


class ParallelWindow(CausalAttention[ParallelState]):
    """y = g window + (1 - g) recurrence, with a gate g for each token and head, over the same queries, keys and values.

    The window uses rotary positions. The recurrence uses them only if its feature map does."""

    def __init__(self, recurrence: Recurrence, window: int, sink: bool = False):
        super().__init__()
        self.heads, self.head_dim, self.value_dim = recurrence.heads, recurrence.head_dim, recurrence.value_dim
        self.recurrence = recurrence
        self.window = WindowAttention(self.heads, self.head_dim, self.value_dim, window, sink)
        self.largest_scale = min(recurrence.largest_scale, self.window.largest_scale)
        self.inputs = {
            **recurrence.inputs,
            **self.window.inputs,
            "window_share": Gate("window_share", "sigmoid", torch.zeros(self.heads)),
            "rotated_q": Rotated("q", self.heads, self.head_dim),
            "rotated_k": Rotated("k", self.heads, self.head_dim),
        }

    def init_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> ParallelState:
        return ParallelState(*(part.init_state(batch, device, dtype) for part in (self.recurrence, self.window)))

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: ParallelState,
        document_starts: Tensor | None = None,
        inputs: Inputs = NOTHING,
    ) -> tuple[Tensor, ParallelState]:
        far, recurrence = self.recurrence(q, k, v, state.recurrence, document_starts, inputs)
        near, window = self.window(*_rotated(q, inputs), v, state.window, document_starts, inputs)
        near, far = weighed(near, far, inputs)
        return near + far, ParallelState(recurrence, window)

    def reference(
        self, q: Tensor, k: Tensor, v: Tensor, document_starts: Tensor | None = None, inputs: Inputs = NOTHING
    ) -> Tensor:
        far = self.recurrence.reference(q, k, v, document_starts, inputs)
        near = self.window.reference(*_rotated(q, inputs), v, document_starts, inputs)
        near, far = weighed(near, far, inputs)
        return near + far

    def effect(
        self, k: Tensor, v: Tensor, document_starts: Tensor | None = None, inputs: Inputs = NOTHING
    ) -> ParallelEffect:
        return ParallelEffect(
            self.recurrence.effect(k, v, document_starts, inputs),
            self.window.effect(inputs["rotated_k"].to(k.dtype), v, document_starts),
        )

    def after_effect(self, state: ParallelState, effect: ParallelEffect) -> ParallelState:
        return ParallelState(
            self.recurrence.after_effect(state.recurrence, effect.recurrence),
            self.window.after_effect(state.window, effect.window),
        )

    @property
    def divides(self) -> bool:
        return self.recurrence.divides

    @property
    def native_decode(self) -> DecodeKind[Any] | None:  # type: ignore[override]
        recurrence = self.recurrence.native_decode
        return None if recurrence is None else decode_of(recurrence)

    @property
    def parts(self) -> Sequence[CausalAttention[Any]]:
        return self.recurrence, self.window


def with_window(recurrence: Recurrence[Any], options: recipe.Attention) -> CausalAttention[Any]:
    """Return a recurrence, with a parallel window if the options set one."""
    window = options.parallel_window
    return recurrence if window is None else ParallelWindow(recurrence, window, options.window_sink)


def _rotated(q: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
    return inputs["rotated_q"].to(q.dtype), inputs["rotated_k"].to(q.dtype)


def weighed(near: Tensor, far: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Return the weighted outputs of the window (`near`) and of the recurrence (`far`), whose sum is the output."""
    share = inputs["window_share"].to(near.dtype)[..., None]
    return share * near, (1 - share) * far
