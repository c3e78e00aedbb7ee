"""What step.cpp is asked for, as it lies in memory; the fields are explained in job.h."""

import ctypes
from typing import Any


def _numbers(*names: str) -> list[tuple[str, Any]]:
    return [(name, ctypes.c_int64) for name in names]


def _addresses(*names: str) -> list[tuple[str, Any]]:
    return [(name, ctypes.c_void_p) for name in names]


class Matrix(ctypes.Structure):
    _fields_ = (*_addresses("numbers", "steps"), *_numbers("kept", "outputs", "inputs"))


class Attention(ctypes.Structure):
    _fields_ = (
        *_numbers("kind", "rotary", "window", "map", "features", "drawn"),
        *_addresses("of_queries", "of_keys", "constants", "log_decay", "forget", "bias"),
    )


class Layer(ctypes.Structure):
    _fields_ = (
        ("attention", Attention),
        *_addresses("norm", "taps", "head_norm", "inner_norm"),
        *((name, Matrix) for name in ("project_in", "project_out", "inner_in", "inner_out")),
    )


class Hourglass(ctypes.Structure):
    _fields_ = (
        *_numbers("pooling", "factor", "first", "last"),
        *_addresses("norm"),
        *((name, Matrix) for name in ("convolution", "project_out")),
    )


class Model(ctypes.Structure):
    _fields_ = (
        *_numbers("layers", "width", "heads", "inner", "seen", "turned"),
        ("embedded", ctypes.c_float),
        *_addresses("embedding", "norm"),
        ("layer", ctypes.POINTER(Layer)),
        ("output", Matrix),
        ("hourglass", Hourglass),
    )


class Job(ctypes.Structure):
    _fields_ = (
        *_addresses("model", "before", "after"),
        *_addresses("pooled_before", "pooled_after", "given_before", "given_after"),
        *_addresses("tokens", "positions", "logits", "scratch"),
        *_numbers("rows"),
        *_addresses("meet", "number", "count"),
    )
