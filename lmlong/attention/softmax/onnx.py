"""Softmax attention as an ONNX graph, over all tokens or over a window."""

import numpy as np

from lmlong.native.onnx.graph import Value
from lmlong.native.onnx.layer import LayerInputs


def softmax_graph(x: LayerInputs, window: int | None = None) -> Value:
    """Return softmax attention to all tokens, or to the last `window` tokens including the current one."""
    if window == 1:
        return x.repeated(x.v, x.value_dim)
    graph, past = x.graph, 0 if window is None else window - 1
    sizes = {"keys": x.head_dim, "values": x.value_dim}
    before = [
        graph.state(f"{x.name}.{name}", np.float32, x.kv_heads, past, size, grows=window is None)
        for name, size in sizes.items()
    ]
    mask = x.tokens.visible(before[0].size(2), window)
    options = {"q_num_heads": x.heads, "kv_num_heads": x.kv_heads}
    y, *after = graph.ops("Attention", 3, *x.qk, x.v, mask, *before, **options)
    for old, new in zip(before, after, strict=True):
        graph.set_state(old, new if window is None else new.slice(2, -past))
    return y.reshape(0, 0, x.heads, x.value_dim)
