"""Inputs of a module that builds its part of a graph: the model's weights, and the inputs of a layer.

Attentions and feature maps build theirs in a method `onnx`. Attention is causal, over queries, keys and values. Its
state is an input and an output of each call.

B batch, T time, H heads, G heads of keys and values, K key dim, V value dim, F features.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lmlong.native.onnx.graph import FUSED, Graph, Operand, Value
from lmlong.native.onnx.tokens import Tokens
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
