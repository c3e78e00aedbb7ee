"""The structures of step.cpp for ctypes, explained in job.h, and the enumerations that it shares with Python."""

import ctypes
from enum import IntEnum
from typing import Any


class Dtype(IntEnum):
    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2


class AttentionKind(IntEnum):
    LINEAR = 0
    WINDOW = 1
    NGRAM = 2
    DELTA = 3
    SOFTMAX_ATTENTION = 4  # beside the feature map of this name


class Pooling(IntEnum):
    NONE = 0
    MEAN = 1
    MAX = 2
    CONV = 3


def _ints(*names: str) -> list[tuple[str, Any]]:
    return [(name, ctypes.c_int64) for name in names]


def _pointers(*names: str) -> list[tuple[str, Any]]:
    return [(name, ctypes.c_void_p) for name in names]


class Matrix(ctypes.Structure):
    _fields_ = (*_pointers("data", "scales"), *_ints("dtype", "outputs", "inputs"))


class Attention(ctypes.Structure):
    _fields_ = (
        *_ints("kind", "uses_rope", "gated", "window", "window_uses_rope", "feature_map", "features", "inner"),
        *_pointers("query_projection", "key_projection", "favor_constants", "log_decay"),
        *_pointers("gate_weight", "gate_bias", "gate_down"),
        *_ints("gate_rank"),
        *_pointers("beta_weight", "beta_bias", "share_weight", "share_bias"),
        *_ints("rows"),
        *_pointers("sizes", "number_weight", "raw_smoothing"),
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
        *_ints("layers", "width", "mlp_width", "conv_width"),
        *_ints("heads", "kv_heads", "head_dim", "value_dim", "any_rope", "past_tokens"),
        ("embedding_scale", ctypes.c_float),
        ("norm_epsilon", ctypes.c_float),
        *_pointers("frequencies", "embedding", "norm"),
        ("layer", ctypes.POINTER(Layer)),
        ("output", Matrix),
        ("hourglass", Hourglass),
    )


class LayerState(ctypes.Structure):
    _fields_ = (
        *_pointers("S", "z", "keys", "values", "current"),
        *_ints("recent"),
        *_pointers("settled_keys", "settled_values", "settled_current"),
        *_ints("settled"),
        *_pointers("number", "ngram"),
        *_pointers("waiting_ngram", "waiting_v", "recent_ngram", "recent_v", "tail"),
        *_ints("float64"),
    )


class DecodeJob(ctypes.Structure):
    _fields_ = (
        *_pointers("model", "states_before", "states_after"),
        *_pointers("tail_before", "tail_after", "upsampled_before", "upsampled_after"),
        *_pointers("tokens", "positions", "last_tokens_before", "last_tokens_after", "logits", "scratch"),
        *_ints("rows", "separate"),
        *_pointers("barrier", "thread_num", "num_threads"),
        *_ints("full", "invalid"),
    )
