"""What a training step does between products, by native code on a CPU: each reads and writes memory once.

N rows, G groups, W width.
"""

import ctypes
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lmlong.native.build import NativeLibrary, load
from lmlong.native.decode.structures import ints, pointers
from lmlong.native.source import NativeCode, Shared
from lmlong.native.threads import run_on_threads

DTYPES = (torch.float32, torch.bfloat16)
IGNORED = -100
"""A target that is not scored."""
BLOCK_ROWS = 64
"""Rows that a worker computes at once."""
NOTHING: Mapping[str, Tensor] = MappingProxyType({})


class Rows(ctypes.Structure):
    """Rows of a tensor; its fields are explained in rows.cpp."""

    _fields_ = (*pointers("data"), *ints("stride", "bfloat16"))


class RowsJob(ctypes.Structure):
    """The arguments of an operation; its fields are explained in rows.cpp."""

    _fields_ = (
        *ints("rows", "groups", "width"),
        *((name, Rows) for name in ("x", "gate", "y", "dx", "dgate")),
        *pointers("gain", "dgain", "targets", "nll"),
        *ints("graded"),
        ("epsilon", ctypes.c_float),
        *ints("blocks_begun"),
    )


def code() -> NativeCode:
    integers = {"BLOCK_ROWS": BLOCK_ROWS, "IGNORED": IGNORED}
    return NativeCode(Path(__file__).parent, Shared({}, [], [Rows, RowsJob], integers))


@cache
def library() -> NativeLibrary | None:
    """Return the library, or None if native code is unavailable."""
    return load(code(), "norms, gates and the loss are computed by torch, slower")


def can_compute(*tensors: Tensor) -> bool:
    """Return whether native code computes operations of these tensors: not those that torch.compile traces."""
    fits = all(x.device.type == "cpu" and x.dtype in DTYPES and x.numel() for x in tensors)
    return fits and not torch.compiler.is_compiling() and library() is not None


def norm(x: Tensor, gain: Tensor, epsilon: float, dtype: torch.dtype, gate: Tensor | None = None) -> Tensor:
    """Return x (..., [G,] W) divided by its root mean square over W, times the gain ([G,] W), in a dtype. With a gate,
    in the shape of x, it is multiplied by its SiLU."""
    rows, gates = (None if each is None else _in_rows(each, gain.numel()) for each in (x, gate))
    return _Norm.apply(rows, gain, gates, epsilon, dtype).view(x.shape)  # type: ignore[no-any-return]


def swiglu(x: Tensor) -> Tensor:
    """Return silu(gate) * value (..., W) of x (..., 2 W), the gate and then the value."""
    return _SwiGLU.apply(_in_rows(x, x.shape[-1])).view(*x.shape[:-1], -1)  # type: ignore[no-any-return]


def loss(logits: Tensor, targets: Tensor, graded: bool) -> Tensor:
    """Return -log p of each target (N,), 0 if ignored. If `graded`, replace the logits (N, W) by their gradients."""
    logits, targets = _in_rows(logits, logits.shape[1]), targets.contiguous()
    nll = logits.new_empty(len(logits), dtype=torch.float32)
    rows = {"x": logits, "dx": logits}
    _run("rows_loss", 1, logits.shape[1], rows, {"targets": targets, "nll": nll}, graded=graded)
    return nll


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gain: Tensor, gate: Tensor | None, epsilon: float, dtype: torch.dtype
    ) -> Tensor:
        y, gain = torch.empty(x.shape, dtype=dtype), gain.contiguous()
        ctx.save_for_backward(x, gain, gate)
        ctx.epsilon = epsilon
        _run("rows_norm", *_groups(gain), {"x": x, "y": y, "gate": gate}, {"gain": gain}, epsilon)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gain, gate = ctx.saved_tensors
        dx, dgate = (None if each is None else torch.empty(each.shape, dtype=each.dtype) for each in (x, gate))
        dgain = gain.new_empty(-(-len(x) // BLOCK_ROWS), *gain.shape)
        rows = {"x": x, "y": _in_rows(dy, x.shape[1]), "gate": gate, "dx": dx, "dgate": dgate}
        _run("rows_norm_backward", *_groups(gain), rows, {"gain": gain, "dgain": dgain}, ctx.epsilon)
        return dx, dgain.sum(0), dgate, None, None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        y = x.new_empty(len(x), x.shape[1] // 2)
        _run("rows_swiglu", 1, y.shape[1], {"x": x, "y": y})
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        dx = torch.empty(x.shape, dtype=x.dtype)
        _run("rows_swiglu_backward", 1, dy.shape[1], {"x": x, "y": _in_rows(dy, dy.shape[1]), "dx": dx})
        return dx


def _in_rows(x: Tensor, width: int) -> Tensor:
    """Return x in contiguous rows (N, width), which are a view of x if its strides allow that."""
    rows = x.reshape(-1, width)
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _groups(gain: Tensor) -> tuple[int, int]:
    return gain.numel() // gain.shape[-1], gain.shape[-1]


def _run(
    function: str,
    groups: int,
    width: int,
    rows: Mapping[str, Tensor | None],
    contiguous: Mapping[str, Tensor] = NOTHING,
    epsilon: float = 0.0,
    graded: bool = False,
) -> None:
    """Run a function of the library. All tensors, by their fields of the job, must outlive the call."""
    x = rows["x"]
    assert x is not None
    job = RowsJob(rows=len(x), groups=groups, width=width, epsilon=epsilon, graded=graded)
    for name, tensor in rows.items():
        if tensor is not None:
            setattr(job, name, Rows(tensor.data_ptr(), tensor.stride(0), tensor.dtype == torch.bfloat16))
    for name, tensor in contiguous.items():
        assert tensor.is_contiguous()
        setattr(job, name, tensor.data_ptr())
    workers = max(1, min(torch.get_num_threads(), -(-len(x) // BLOCK_ROWS)))
    run_on_threads(getattr(library(), function), job, workers)
