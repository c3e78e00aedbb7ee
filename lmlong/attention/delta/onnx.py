"""The delta rule as an ONNX graph."""

from typing import Any

from lmlong.native.onnx.graph import Value
from lmlong.native.onnx.layer import GraphReader, LayerInputs
from lmlong.native.spec import NativeSpec


def delta_graph(reader: GraphReader, spec: NativeSpec, x: LayerInputs) -> Value:
    """Return S_t^T q_t of S_t = a_t (I - b_t k_t k_t^T) S_(t-1) + b_t k_t v_t^T, with q and k of length one."""
    log_decay = x.log_decay(spec.weights["log_decay"])
    feature_map: Any = spec.parts["feature_map"]
    fq, fk = x.features(reader, feature_map)
    v, rule = x.repeated(x.v, x.value_dim), "delta" if log_decay is None else "gated_delta"
    return x.recurrence(rule, fq, fk, v, feature_map.features, x.value_dim, log_decay, x.gates["beta"])
