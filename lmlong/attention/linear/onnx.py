"""Linear attention as an ONNX graph. z is the last column of S, for a value of 1 at every token."""

from typing import Any

from lmlong.attention.linear.naive import MIN_DENOMINATOR
from lmlong.native.onnx.graph import Value
from lmlong.native.onnx.layer import GraphReader, LayerInputs
from lmlong.native.spec import NativeSpec


def linear_graph(reader: GraphReader, spec: NativeSpec, x: LayerInputs) -> Value:
    """Return S_t = g_t S_(t-1) + fk_t [v_t, 1]^T read as fq_t S_t, divided by its last column."""
    log_decay = x.log_decay(spec.weights["log_decay"])
    feature_map: Any = spec.parts["feature_map"]
    fq, fk = x.features(reader, feature_map)
    v = x.repeated(x.v, x.value_dim).pad(0, 1, 1.0)
    rule = "linear" if log_decay is None else "gated"
    y = x.recurrence(rule, fq, fk, v, feature_map.features, x.value_dim + 1, log_decay)
    numerator, denominator = y.split(x.value_dim, 1)
    return numerator / x.graph.op("Max", denominator, MIN_DENOMINATOR)
