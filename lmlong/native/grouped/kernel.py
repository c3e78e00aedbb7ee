"""Products of vectors with a matrix in groups of integers, by native code on a CPU.

N outputs, K inputs.
"""

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from lmlong.native.build import NativeLibrary, load
from lmlong.native.decode.structures import ints, pointers
from lmlong.native.source import NativeCode, Shared
from lmlong.native.threads import give_barrier, run_on_threads

CODE = Path(__file__).parent
PANEL = 16
"""Outputs that are stored together."""


class ProductJob(ctypes.Structure):
    """The arguments of a product; its fields are explained in product.cpp."""

    _fields_ = (
        *pointers("matrix", "x", "y", "scratch"),
        *ints("int4", "outputs", "inputs", "vectors"),
        *pointers("barrier", "thread_num", "num_threads"),
    )


def code() -> NativeCode:
    return NativeCode(CODE, Shared({}, [], [ProductJob]))


@cache
def library() -> NativeLibrary | None:
    """Return the library, or None if native code is unavailable."""
    functions = load(code(), "products of quantized matrices are computed by torch, slower")
    if functions is not None:
        functions.scratch_size.argtypes = [ctypes.c_void_p]
        functions.scratch_size.restype = ctypes.c_int64
    return functions


def multiply(x: Tensor, panels: Tensor, outputs: int, int4: bool) -> Tensor:
    """Return the products (..., N) of vectors (..., K) with a matrix (N, K), packed as in weight_panels.py."""
    functions = library()
    assert functions is not None and x.dtype == torch.float32 and panels.is_contiguous()
    vectors = x.reshape(-1, x.shape[-1]).contiguous()
    y = vectors.new_empty(len(vectors), outputs)
    job = ProductJob(
        panels.data_ptr(), vectors.data_ptr(), y.data_ptr(), None, int4, outputs, x.shape[-1], len(vectors)
    )
    scratch = torch.empty(functions.scratch_size(ctypes.byref(job)), dtype=torch.uint8, device="cpu")
    job.scratch = scratch.data_ptr()
    workers = max(1, min(torch.get_num_threads(), -(-outputs // PANEL)))
    give_barrier(job, workers)
    run_on_threads(functions.multiply, job, workers)
    return y.view(*x.shape[:-1], outputs)
