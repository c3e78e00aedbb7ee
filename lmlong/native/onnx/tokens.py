"""Positions and attention masks of the tokens of a call, shared by all layers.

B batch, T time, P past keys, D head dim.
"""

import numpy as np
from torch import Tensor

from lmlong.native.onnx.graph import BATCH, TIME, Graph, Value


class Tokens:
    """The tokens of a call, and values computed from them once for all layers."""

    def __init__(self, graph: Graph, past: int):
        self.graph, self.past = graph, past
        self.ids = graph.input("ids", np.int64, [BATCH, TIME])
        self.time = self.ids.size(1)
        self._position: Value | None = None
        self._with_past: Value | None = None
        self._masks: dict[int | None, Value] = {}
        self._cos_sin: dict[bytes, tuple[Value, Value]] = {}

    def range(self, end: Value) -> Value:
        """Return 0, 1, ..., end - 1, for `end` (1,)."""
        return self.graph.op("Range", 0, self.graph.op("Squeeze", end), 1)

    @property
    def position(self) -> Value:
        """How many tokens of its document each row had before the call (B, 1)."""
        if self._position is None:
            before = self.graph.state("position", np.int64, 1)
            self.graph.set_state(before, before + self.time)
            self._position = before
        return self._position

    @property
    def with_past(self) -> Value:
        """The last tokens before the call and the tokens of the call (B, past + T), as id + 1: 0 means no token."""
        if self._with_past is None:
            before = self.graph.state("tokens", np.int64, self.past)
            self._with_past = self.graph.concat(before, self.ids + 1, axis=1)
            self.graph.set_state(before, self._with_past.slice(1, -self.past))
        return self._with_past

    def cos_sin(self, frequencies: Tensor) -> tuple[Value, Value]:
        """Return the cosines and sines (B, T, D / 2) of rotary positions. Turns are counted in float64, since float32
        loses part of a turn far into a text. The fraction of a turn is in float32, which onnxruntime's Cos requires."""
        turns_per_token = frequencies.double().numpy() / (2 * np.pi)
        key = turns_per_token.tobytes()
        if key not in self._cos_sin:
            positions = (self.position + self.range(self.time)).unsqueeze(2)
            turns = positions.cast(np.float64) * turns_per_token
            angles = (turns - self.graph.op("Floor", turns)).cast(np.float32) * (2 * np.pi)
            self._cos_sin[key] = self.graph.op("Cos", angles), self.graph.op("Sin", angles)
        return self._cos_sin[key]

    def visible(self, past: Value, window: int | None = None) -> Value:
        """Return which keys (B, 1, T, P + T) each query sees: `past` (1,) keys before the call, some of which may be of
        an earlier document, and the keys of the call."""
        if window not in self._masks:
            key = self.range(past + self.time)
            query = (self.range(self.time) + past).unsqueeze(1)
            seen = (key <= query) & (key >= (past - self.position).unsqueeze(1))
            seen = seen if window is None else seen & (key > query - window)
            self._masks[window] = seen.unsqueeze(1)
        return self._masks[window]
