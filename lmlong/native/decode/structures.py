"""The structures of step.cpp for ctypes, documented in job.h, and its enumerations, with that of feature maps in any
native code."""

import ctypes
from enum import IntEnum
from typing import Any


class Dtype(IntEnum):
    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2
    INT4 = 3


class OutputGate(IntEnum):
    NO_GATE = 0
    SILU_GATE = 1
    SIGMOID_GATE = 2
    IDENTITY_GATE = 3


class Pooling(IntEnum):
    NONE = 0
    MEAN = 1
    MAX = 2
    CONV = 3


class FeatureMap(IntEnum):
    IDENTITY = 0
    ELU = 1
    RELU = 2
    COSINE = 3
    SOFTMAX = 4
    TAYLOR = 5
    FAVOR = 6
    SILU = 7
    HEDGEHOG = 8


def ints(*names: str) -> list[tuple[str, Any]]:
    return [(name, ctypes.c_int64) for name in names]


def pointers(*names: str) -> list[tuple[str, Any]]:
    return [(name, ctypes.c_void_p) for name in names]


def structure(name: str, *fields: tuple[str, Any]) -> type[ctypes.Structure]:
    """Return a structure by its name in C++."""
    return type(name, (ctypes.Structure,), {"_fields_": fields})


class Matrix(ctypes.Structure):
    _fields_ = (*pointers("data"), *ints("dtype", "outputs", "inputs"))


class FeatureMapWeights(ctypes.Structure):
    _fields_ = (*ints("map", "size", "inner"), *pointers("query_projection", "key_projection", "constants"))


class Gate(ctypes.Structure):
    _fields_ = (*pointers("weight", "bias"),)


class Forgetting(ctypes.Structure):
    _fields_ = (*pointers("log_decay"), ("gate", Gate), *pointers("log_rate", "gate_down"), *ints("rank"))


class Layer(ctypes.Structure):
    _fields_ = (
        *ints("kind"),
        *pointers("attention"),
        *ints("state", "heads", "query_heads", "key_heads", "kv_heads", "head_dim", "value_dim"),
        *ints("conv_width", "conv_silu", "cos_sin", "uses_rope", "rotated"),
        *ints("output_gate", "input_gated", "grouped", "norms_together", "norm_after", "mlp_norm_after"),
        *pointers("norm", "conv_weight", "query_norm", "key_norm", "head_norm", "mlp_norm"),
        *((name, Matrix) for name in ("in_proj", "out_proj", "mlp_in_proj", "mlp_out_proj")),
        ("head_norm_epsilon", ctypes.c_float),
    )


class Hourglass(ctypes.Structure):
    _fields_ = (
        *ints("pooling", "factor", "first_layer", "end_layer", "state"),
        *pointers("norm"),
        *((name, Matrix) for name in ("conv", "out_proj")),
    )


class NgramTables(ctypes.Structure):
    _fields_ = (*ints("count", "rows", "width"), *pointers("orders"), ("table", Matrix), ("projection", Matrix))


class Rotation(ctypes.Structure):
    _fields_ = (*ints("pairs"), *pointers("frequencies"))


class Model(ctypes.Structure):
    _fields_ = (
        *ints("layers", "width", "mlp_width", "rotations", "cos_sins", "past_tokens", "state_size"),
        ("embedding_scale", ctypes.c_float),
        ("norm_epsilon", ctypes.c_float),
        ("rotation", ctypes.POINTER(Rotation)),
        *pointers("norm"),
        ("layer", ctypes.POINTER(Layer)),
        ("embedding", Matrix),
        ("output", Matrix),
        ("hourglass", Hourglass),
        ("tables", NgramTables),
    )


class LayerState(ctypes.Structure):
    _fields_ = (*pointers("tail"),)


class HourglassState(ctypes.Structure):
    _fields_ = (*pointers("tail", "upsampled"),)


class DecodeJob(ctypes.Structure):
    _fields_ = (
        *pointers("model", "states_before", "states_after"),
        *pointers("tokens", "positions", "last_tokens", "logits", "hidden", "scratch"),
        *ints("rows", "consecutive"),
        *pointers("barrier", "thread_num", "num_threads"),
        *ints("full", "invalid"),
    )
