"""The structures of step.cpp for ctypes; their fields are explained in job.h."""

import ctypes
from typing import Any


def _ints(*names: str) -> list[tuple[str, Any]]:
    return [(name, ctypes.c_int64) for name in names]


def _pointers(*names: str) -> list[tuple[str, Any]]:
    return [(name, ctypes.c_void_p) for name in names]


class Matrix(ctypes.Structure):
    _fields_ = (*_pointers("data", "scales"), *_ints("dtype", "outputs", "inputs"))


class Attention(ctypes.Structure):
    _fields_ = (
        *_ints("kind", "uses_rope", "window", "feature_map", "features", "projected"),
        *_pointers("query_projection", "key_projection", "favor_constants", "log_decay", "gate_weight", "gate_bias"),
    )


class Layer(ctypes.Structure):
    _fields_ = (
        ("attention", Attention),
        *_pointers("norm", "conv_weight", "head_norm", "mlp_norm"),
        *((name, Matrix) for name in ("in_proj", "out_proj", "mlp_in_proj", "mlp_out_proj")),
    )


class Hourglass(ctypes.Structure):
    _fields_ = (
        *_ints("pooling", "factor", "first_layer", "end_layer"),
        *_pointers("norm"),
        *((name, Matrix) for name in ("conv", "out_proj")),
    )


class Model(ctypes.Structure):
    _fields_ = (
        *_ints("layers", "width", "heads", "mlp_width", "conv_width", "any_rope"),
        ("embedding_scale", ctypes.c_float),
        *_pointers("embedding", "norm"),
        ("layer", ctypes.POINTER(Layer)),
        ("output", Matrix),
        ("hourglass", Hourglass),
    )


class Job(ctypes.Structure):
    _fields_ = (
        *_pointers("model", "states_before", "states_after"),
        *_pointers("tail_before", "tail_after", "upsampled_before", "upsampled_after"),
        *_pointers("tokens", "positions", "logits", "scratch"),
        *_ints("rows"),
        *_pointers("barrier", "thread_num", "num_threads"),
    )
