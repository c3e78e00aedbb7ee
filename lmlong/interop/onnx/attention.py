"""Causal attention over queries, keys and values with a state that a call is given and returns.

The recurrences of linear attention and of the delta rule are one operator of onnxruntime, `LinearAttention`, in
float32. z is a column of S: that of a value which is 1 for all tokens.

B batch, T time, H heads, G heads of keys and values, K key dim, V value dim, F features.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from lmlong.interop.onnx.features import features
from lmlong.interop.onnx.graph import FUSED, Operand, Value
from lmlong.interop.onnx.modules import Modules, array
from lmlong.interop.onnx.ngram import ngram
from lmlong.interop.onnx.tokens import Tokens
from lmlong.native.spec import NativeSpec

TINIEST = 1e-30
"""The smallest denominator."""


class Heads(NamedTuple):
    """What a layer reads, heads side by side, and its sizes."""

    qk: Sequence[Value]  # (B, T, H K) and (B, T, G K); none of an attention without queries and keys
    v: Value  # (B, T, G V)
    gates: Mapping[str, Value]
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int

    def repeated(self, x: Value, size: int) -> Value:
        """Return keys or values (B, T, G size) as (B, T, H, size)."""
        x = x.reshape(0, 0, self.kv_heads, size)
        if self.heads == self.kv_heads:
            return x
        return x.graph.op("Gather", x, np.arange(self.heads) // (self.heads // self.kv_heads), axis=2)


def attention(modules: Modules, module: object, plain: Heads, rotated: Heads, tokens: Tokens, layer: str) -> Value:
    """Return what an attention finds (B, T, H, V), whose state bears the name of its layer; `rotated` has rotary
    positions for a window beside a recurrence."""
    spec = modules.open(module)
    if spec.kind == "linear":
        return _linear(modules, spec, plain, tokens, layer)
    if spec.kind == "delta":
        return _delta(modules, spec, plain, tokens, layer)
    if spec.kind == "parallel_window":
        far = attention(modules, spec.parts["recurrence"], plain, plain, tokens, layer)
        near = attention(modules, spec.parts["window"], rotated, rotated, tokens, layer)
        share = plain.gates["window_share"].unsqueeze(3)
        return share * near + (-share + 1.0) * far
    if spec.kind == "ngram":
        v = plain.v.reshape(0, 0, plain.heads, plain.value_dim)
        return ngram(modules, spec, v, plain.value_dim, plain.gates["read_gate"], tokens, layer)
    assert spec.kind in ("softmax_attention", "window"), spec.kind
    return _softmax(plain, tokens, layer, spec.options.get("window"))


def _linear(modules: Modules, spec: NativeSpec, x: Heads, tokens: Tokens, layer: str) -> Value:
    """S_t = g_t S_(t-1) + fk_t [v_t, 1]^T, and fq_t S_t, whose last column divides the others."""
    feature_map, log_decay = spec.parts["feature_map"], _log_decay(modules, spec, x, tokens)
    fq, fk = _features(modules, feature_map, x)
    v = x.repeated(x.v, x.value_dim).pad(0, 1, 1.0)
    rule = "linear" if log_decay is None else "gated"
    size = modules.open(feature_map).options["features"]
    y = _recurrence(x.heads, size, x.value_dim + 1, rule, layer, fq, fk, v, log_decay)
    numerator, denominator = y.split(x.value_dim, 1)
    return numerator / y.graph.op("Max", denominator, TINIEST)


def _delta(modules: Modules, spec: NativeSpec, x: Heads, tokens: Tokens, layer: str) -> Value:
    """S_t = a_t (I - b_t k_t k_t^T) S_(t-1) + b_t k_t v_t^T, and S_t^T q_t, with q and k of length one."""
    feature_map, log_decay = spec.parts["feature_map"], _log_decay(modules, spec, x, tokens)
    fq, fk = _features(modules, feature_map, x)
    v, rule = x.repeated(x.v, x.value_dim), "delta" if log_decay is None else "gated_delta"
    size = modules.open(feature_map).options["features"]
    return _recurrence(x.heads, size, x.value_dim, rule, layer, fq, fk, v, log_decay, x.gates["beta"])


def _features(modules: Modules, feature_map: object, x: Heads) -> tuple[Value, Value]:
    """Return those of queries and keys (B, T, H, F)."""
    q, k = x.qk
    fq = features(modules, feature_map, q.reshape(0, 0, x.heads, x.head_dim), "query")
    return fq, features(modules, feature_map, x.repeated(k, x.head_dim), "key")


def _log_decay(modules: Modules, spec: NativeSpec, x: Heads, tokens: Tokens) -> Value | None:
    """Return what is left of the state at each token (B, T, H), or of each of its features (B, T, H F)."""
    fixed = spec.weights["log_decay"]
    if fixed is None:
        return x.gates.get("log_decay")
    modules.know(fixed)
    shape = tokens.graph.concat(tokens.graph.op("Shape", tokens.ids), np.array([x.heads]), axis=0)
    return tokens.graph.op("Expand", array(fixed), shape)


def _recurrence(heads: int, size: int, values: int, rule: str, layer: str, *inputs: Value | None) -> Value:
    """Return what queries find (B, T, H, V) given (B, T, H, F or V) of queries, keys and values, and gates."""
    q, k, v, *gates = inputs
    assert q is not None and k is not None and v is not None
    graph = q.graph
    before = graph.state(f"{layer}.S", np.float32, heads, size, values)
    flat: list[Operand] = [x.reshape(0, 0, -1) for x in (q, k, v)]
    options = {"q_num_heads": heads, "kv_num_heads": heads, "update_rule": rule, "scale": 1.0, "domain": FUSED}
    y, after = graph.ops("LinearAttention", 2, *flat, before, *gates, **options)
    graph.set_state(before, after)
    return y.reshape(0, 0, heads, values)


def _softmax(x: Heads, tokens: Tokens, layer: str, window: int | None) -> Value:
    """Softmax attention over all tokens, or the last `window`, the token itself among them."""
    graph = tokens.graph
    if window == 1:
        return x.repeated(x.v, x.value_dim)
    kept = 0 if window is None else window - 1
    sizes = {"keys": x.head_dim, "values": x.value_dim}
    before = [
        graph.state(f"{layer}.{name}", np.float32, x.kv_heads, kept, size, grows=window is None)
        for name, size in sizes.items()
    ]
    mask = tokens.visible(before[0].size(2), window)
    options = {"q_num_heads": x.heads, "kv_num_heads": x.kv_heads}
    y, *after = graph.ops("Attention", 3, *x.qk, x.v, mask, *before, **options)
    for old, new in zip(before, after, strict=True):
        graph.set_state(old, new if window is None else new.slice(2, -kept))
    return y.reshape(0, 0, x.heads, x.value_dim)
