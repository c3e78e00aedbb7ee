"""Feature maps of linear attention and of the delta rule.

B batch, T time, H heads, D head dim, F features.
"""

from typing import Literal

import numpy as np

from lmlong.attention.delta.features import TINY
from lmlong.attention.feature_maps import ELU_FLOOR, RMS_EPS, Cosine, Relu, Softmax
from lmlong.interop.onnx.graph import Value
from lmlong.interop.onnx.modules import Modules, array
from lmlong.native.spec import NativeSpec

Side = Literal["query", "key"]


def features(modules: Modules, module: object, x: Value, side: Side) -> Value:
    """Return features (B, T, H, F) of queries or keys (B, T, H, D)."""
    spec, op = modules.open(module), x.graph.op
    if spec.kind == "unit":
        x = features(modules, spec.parts["inner"], x, side)
        return x / op("Sqrt", (x * x).sum() + TINY)
    if spec.kind == "silu":
        return x * op("Sigmoid", x)
    if spec.kind == "elu":
        return op("Relu", x) + op("Exp", op("Min", x, 0.0)) + ELU_FLOOR
    if spec.kind == "relu":
        return op("Relu", x) + Relu.FLOOR
    if spec.kind == "softmax":
        return op("Softmax", x) + Softmax.FLOOR
    if spec.kind == "cosine":
        length = op("Sqrt", (x * x).sum() + Cosine.TINY)
        return (x * Cosine.SHRINK / length).pad(1, 0, 1.0)
    if spec.kind == "favor":
        return _favor(modules, spec, x, side)
    assert spec.kind in ("hedgehog", "taylor"), spec.kind
    projection = spec.weights[f"{side}_projection"]
    x = x if projection is None else by_head(x, modules.weight(projection))
    if spec.kind == "hedgehog":
        return op("Softmax", x.graph.concat(x, -x, axis=-1)) + Softmax.FLOOR
    return _taylor(spec, x)


def by_head(x: Value, weight: Value) -> Value:
    """Return the product of x (B, T, H, D) with a matrix (H, D, E) for each head."""
    return (x.transpose(0, 2, 1, 3) @ weight).transpose(0, 2, 1, 3)


def _taylor(spec: NativeSpec, x: Value) -> Value:
    """Return [1, x, x (x) x / sqrt 2] of x of one length, each pair once."""
    inner, op = spec.options["inner"], x.graph.op
    x = _rms_norm(x, inner, inner**-0.25)
    left, right = (op("Gather", x, index, axis=-1) for index in np.triu_indices(inner, k=1))
    return x.graph.concat(x, left * right, x * x * 0.5**0.5, axis=-1).pad(1, 0, 1.0)


def _favor(modules: Modules, spec: NativeSpec, x: Value, side: Side) -> Value:
    """Return exp(w . x - |x|^2 / 2) of x of one length, up to factors that cancel."""
    projection, constants, op = spec.weights["projection"], spec.weights["constants"], x.graph.op
    modules.know(spec.weights["raw_gain"])  # which the constants are made of
    assert projection is not None and constants is not None
    scale, half_square, too_large = (array(constants)[None, None, :, 0, i, None] for i in range(3))
    rows, width = projection.shape[1:]
    x = _rms_norm(x, width, 1.0) * scale
    exponent = by_head(x, modules.weight(projection, transposed=True))
    if spec.options["features"] == 2 * rows:  # the hyperbolic form
        exponent = x.graph.concat(exponent, -exponent, axis=-1)
    if side == "query":
        return op("Exp", exponent - exponent.max())
    return op("Exp", exponent - ((x * x).sum() * 0.5 - half_square + too_large))


def _rms_norm(x: Value, width: int, scale: float) -> Value:
    return x.graph.op("RMSNormalization", x, np.full(width, scale, np.float32), axis=-1, epsilon=RMS_EPS)
