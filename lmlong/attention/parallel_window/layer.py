"""A recurrence and a window in one layer: exact attention to near tokens, a state of constant size for the rest.

B batch, H heads, T time, K key dim, V value dim.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lmlong.attention.base import CausalAttention
from lmlong.attention.inputs import NOTHING, Gate, Inputs, Rotated
from lmlong.attention.parallel_window.native.decode import beside_window
from lmlong.attention.parallel_window.state import ParallelState
from lmlong.attention.recurrence import Recurrence
from lmlong.attention.window.layer import WindowAttention
from lmlong.native.decode.kind import DecodeKind
from lmlong.native.onnx.graph import Value
from lmlong.native.onnx.layer import GraphReader, LayerInputs
from lmlong.native.spec import NativeSpec


class ParallelWindow(CausalAttention[ParallelState]):
    """y = g window + (1 - g) recurrence, with a gate g for each token and head, over the same queries, keys and values.

    The window uses rotary positions. The recurrence uses them only if its feature map does."""

    def __init__(self, recurrence: Recurrence, window: int):
        super().__init__()
        self.heads, self.head_dim, self.value_dim = recurrence.heads, recurrence.head_dim, recurrence.value_dim
        self.recurrence = recurrence
        self.window = WindowAttention(self.heads, self.head_dim, self.value_dim, window)
        self.uses_rope = recurrence.uses_rope
        self.largest_scale = min(recurrence.largest_scale, self.window.largest_scale)
        self.inputs = {
            **recurrence.inputs,
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
        near, window = self.window(*_rotated(q, inputs), v, state.window, document_starts)
        near, far = weighed(near, far, inputs)
        return near + far, ParallelState(recurrence, window)

    def reference(
        self, q: Tensor, k: Tensor, v: Tensor, document_starts: Tensor | None = None, inputs: Inputs = NOTHING
    ) -> Tensor:
        far = self.recurrence.reference(q, k, v, document_starts, inputs)
        near = self.window.reference(*_rotated(q, inputs), v, document_starts)
        near, far = weighed(near, far, inputs)
        return near + far

    @property
    def native_decode(self) -> DecodeKind[Any] | None:  # type: ignore[override]
        recurrence = self.recurrence.native_decode
        return None if recurrence is None else beside_window(recurrence)

    @property
    def parts(self) -> Sequence[CausalAttention[Any]]:
        return self.recurrence, self.window

    def native_spec(self) -> NativeSpec:
        return NativeSpec("parallel_window", parts={"recurrence": self.recurrence, "window": self.window})

    def onnx(self, reader: GraphReader, x: LayerInputs) -> Value:
        parts = reader.open(self).parts
        far = reader.build(parts["recurrence"], x)
        near = reader.build(parts["window"], x._replace(qk=x.rotated))
        share = x.gates["window_share"].unsqueeze(3)
        return share * near + (-share + 1.0) * far


def _rotated(q: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
    return inputs["rotated_q"].to(q.dtype), inputs["rotated_k"].to(q.dtype)


def weighed(near: Tensor, far: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Return the weighted outputs of the window (`near`) and of the recurrence (`far`), whose sum is the output."""
    share = inputs["window_share"].to(near.dtype)[..., None]
    return share * near, (1 - share) * far
