"""Learning while reading by native code on a CPU, with the rows of the output layer divided among the threads.

L positions, V vocabulary.
"""

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from lmlong.model.learning.state import BLOCK, NOT_LEARNED, SCALE_RATE, Delta, Rates, keys_of
from lmlong.model.loss import IGNORED
from lmlong.native.build import NativeLibrary, load
from lmlong.native.source import NativeCode, Shared
from lmlong.native.threads import give_barrier, run_on_threads

CODE = Path(__file__).parent
INTEGERS = {"BLOCK": BLOCK, "NOT_LEARNED": NOT_LEARNED, "IGNORED": IGNORED}
ROWS_PER_THREAD = 16
"""Minimum number of rows of the output layer for each thread."""


class ReadJob(ctypes.Structure):
    """The arguments of a reading; its fields are explained in learn.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("vocabulary", "width", "rank", "positions")),
        *((name, ctypes.c_void_p) for name in ("weight", "D", "bias", "hidden", "keys", "targets", "scored", "nll")),
        *((name, ctypes.c_void_p) for name in ("scratch", "squares", "scale", "slopes")),
        *((name, ctypes.c_float) for name in ("rate", "bias_rate", "prior", "scale_rate")),
        *((name, ctypes.c_void_p) for name in ("barrier", "thread_num", "num_threads")),
        ("invalid", ctypes.c_int64),
    )


class ChangeJob(ctypes.Structure):
    """The arguments of `add_change`."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("vocabulary", "rank")),
        *((name, ctypes.c_void_p) for name in ("D", "bias", "scale", "key", "logits")),
    )


def code() -> NativeCode:
    return NativeCode(CODE, Shared({}, [], [ReadJob, ChangeJob], INTEGERS))


@cache
def library() -> NativeLibrary | None:
    """Return the library, or None if native code is unavailable."""
    functions = load(code(), "learning while reading is computed by torch, slower")
    if functions is not None:
        functions.scratch_size.argtypes = [ctypes.c_void_p, ctypes.c_int64]
        functions.scratch_size.restype = ctypes.c_int64
    return functions


def read_blocks(
    weight: Tensor, delta: Delta, hidden: Tensor, targets: Tensor, scored: Tensor | None, rates: Rates
) -> Tensor | None:
    """Learn from consecutive positions of one document, from the first of a block on, and return -log p (L,) of the
    tokens `scored` (L,), 0 if ignored, or None.

    `hidden` (L, width) is the last hidden state at each position, and `targets` (L,) the token after it, or
    NOT_LEARNED. `weight` (V, width) is that of the output layer, and `delta`, without a batch dimension, is updated in
    place after each block but the last, even if the last is complete.
    """
    functions = library()
    assert functions is not None
    (vocabulary, width), positions = weight.shape, len(hidden)
    hidden, targets = hidden.contiguous(), targets.contiguous()
    keys = keys_of(hidden, delta.D)
    scored = None if scored is None else scored.contiguous()
    nll = None if scored is None else hidden.new_zeros(positions)
    tensors = {"weight": weight, "hidden": hidden, "keys": keys, **delta._asdict()}
    tokens = {"targets": targets, "scored": scored}
    job = ReadJob(vocabulary, width, keys.shape[1], positions)
    job.rate, job.bias_rate, job.prior, job.scale_rate = *rates, SCALE_RATE
    for name, x in {**tensors, **tokens, "nll": nll}.items():
        assert x is None or (x.is_contiguous() and x.dtype == (torch.long if name in tokens else torch.float32))
        setattr(job, name, None if x is None else x.data_ptr())
    workers = max(1, min(torch.get_num_threads(), vocabulary // ROWS_PER_THREAD))
    give_barrier(job, workers)
    scratch = hidden.new_empty(functions.scratch_size(ctypes.byref(job), workers))
    job.scratch = scratch.data_ptr()
    run_on_threads(functions.read_blocks, job, workers)
    if job.invalid:
        raise IndexError("learning while reading: a token is not in the vocabulary")
    return nll


def change_of_logits(delta: Delta, hidden: Tensor) -> Tensor:
    """Return scale (D k + bias) for the key of one hidden state (1, width)."""
    functions, (D, bias, _, scale, _) = library(), delta
    assert functions is not None and len(hidden) == 1
    key, logits = keys_of(hidden, D).contiguous(), torch.zeros_like(bias)
    tensors = (D, bias, scale, key, logits)
    assert all(x.is_contiguous() and x.dtype == torch.float32 for x in tensors)
    functions.add_change(ctypes.byref(ChangeJob(*D.shape[1:], *(x.data_ptr() for x in tensors))))
    return logits
