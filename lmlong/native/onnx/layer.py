"""Inputs of a module that builds its part of a graph: the model's weights, the tokens, and the inputs of a layer.

Attentions and feature maps build theirs in a method `onnx`. Attention is causal, over queries, keys and values. Its
state is an input and an output of each call.

B batch, T time, P past keys, H heads, G heads of keys and values, K key dim, V value dim, F features.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lmlong.native.onnx.graph import BATCH, FUSED, TIME, Graph, Operand, Value
from lmlong.native.spec import ModelReader, NoNativeForm

Side = Literal["query", "key"]


class GraphReader(ModelReader):
    """The modules of a model, opened one by one while its graph is built."""

    def __init__(self, graph: Graph, model: nn.Module):
        super().__init__(model)
        self.graph = graph
        named = chain(model.named_parameters(), model.named_buffers())
        self._names = {weight.data_ptr(): name for name, weight in named}
        self._weights: dict[str, Value] = {}

    def weight(self, tensor: Tensor | None, transposed: bool = False) -> Value:
        """Return a weight in float32; a matrix may be transposed."""
        assert tensor is not None
        name = self._names[tensor.data_ptr()]
        if name not in self._weights:
            self._weights[name] = self.graph.weight(name, array(tensor.mT if transposed else tensor))
        return self._weights[name]

    def build(self, module: Any, *arguments: Any) -> Value:
        """Return the output of an attention or a feature map. Its own class must define `onnx`: an inherited method may
        build another computation."""
        self.open(module)
        if "onnx" not in vars(type(module)):
            raise NoNativeForm(module, f"{type(module).__name__} has no method onnx")
        return module.onnx(self, *arguments)


class Tokens:
    """The tokens of a call, and positions and masks computed from them once for all layers."""

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
        """Return the cosines and sines (B, T, K / 2) of rotary positions. Turns are counted in float64, since float32
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


class LayerInputs(NamedTuple):
    """The inputs of a layer's attention, heads side by side, and its sizes."""

    name: str  # of the layer and of its state
    tokens: Tokens
    qk: Sequence[Value]  # (B, T, H K) and (B, T, G K); empty for an attention without queries and keys
    rotated: Sequence[Value]  # the same with rotary positions, if the layer has any
    v: Value  # (B, T, G V)
    gates: Mapping[str, Value]  # (B, T, H) or (B, T, H F), by input name
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int

    @property
    def graph(self) -> Graph:
        return self.tokens.graph

    def repeated(self, x: Value, size: int) -> Value:
        """Return keys or values (B, T, G size) as (B, T, H, size)."""
        x = x.reshape(0, 0, self.kv_heads, size)
        if self.heads == self.kv_heads:
            return x
        return self.graph.op("Gather", x, np.arange(self.heads) // (self.heads // self.kv_heads), axis=2)

    def features(self, reader: GraphReader, feature_map: Any) -> tuple[Value, Value]:
        """Return the features of queries and keys (B, T, H, F)."""
        q, k = self.qk
        fq = reader.build(feature_map, q.reshape(0, 0, self.heads, self.head_dim), "query")
        return fq, reader.build(feature_map, self.repeated(k, self.head_dim), "key")

    def log_decay(self, fixed: Tensor | None) -> Value | None:
        """Return the log decay of the state at each token (B, T, H) or at each token and feature (B, T, H F): the fixed
        decay, the learned decay or None."""
        if fixed is None:
            return self.gates.get("log_decay")
        shape = self.graph.concat(self.graph.op("Shape", self.tokens.ids), np.array([self.heads]), axis=0)
        return self.graph.op("Expand", array(fixed), shape)

    def recurrence(
        self, rule: str, fq: Value, fk: Value, v: Value, features: int, values: int, *gates: Value | None
    ) -> Value:
        """Return S_t^T fq_t (B, T, H, V) for fq and fk (B, T, H, F) and v (B, T, H, V). The state S (F, V) is in
        float32. `rule` is the update rule of onnxruntime's operator."""
        before = self.graph.state(f"{self.name}.S", np.float32, self.heads, features, values)
        flat: list[Operand] = [x.reshape(0, 0, -1) for x in (fq, fk, v)]
        options = {"q_num_heads": self.heads, "kv_num_heads": self.heads, "update_rule": rule, "scale": 1.0}
        y, after = self.graph.ops("LinearAttention", 2, *flat, before, *gates, **options, domain=FUSED)
        self.graph.set_state(before, after)
        return y.reshape(0, 0, self.heads, values)


def array(tensor: Tensor) -> np.ndarray:
    """Return a tensor in float32."""
    return tensor.detach().to(torch.float32).numpy()


def by_head(x: Value, weight: Value) -> Value:
    """Return the product of x (B, T, H, D) with a matrix (H, D, E) for each head."""
    return (x.transpose(0, 2, 1, 3) @ weight).transpose(0, 2, 1, 3)


def unit_rms(x: Value, width: int, scale: float, epsilon: float) -> Value:
    """Return x (..., width) normalized to the root mean square `scale`."""
    return x.graph.op("RMSNormalization", x, np.full(width, scale, np.float32), axis=-1, epsilon=epsilon)
