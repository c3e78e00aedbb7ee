"""What a training step does between products, by native code on a CPU: each reads and writes memory once.

N rows, G groups, W width.
"""

import ctypes
from collections.abc import Mapping, Sequence
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
        *pointers("gain", "dgain"),
        *ints("time", "taps"),
        ("tail", Rows),
        ("dtail", Rows),
        *pointers("positions", "targets", "nll"),
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


def can_compute(*tensors: Tensor, weight: Tensor | None = None) -> bool:
    """Return whether native code computes operations of these tensors, with a weight: not those that torch.compile
    traces, nor of tensors without values, which are of other classes."""
    fits = all(type(x) is Tensor and x.device.type == "cpu" and x.dtype in DTYPES and x.numel() for x in tensors)
    fits = fits and (weight is None or weight.dtype == torch.float32)
    return fits and not torch.compiler.is_compiling() and library() is not None


def norm(x: Tensor, gain: Tensor, epsilon: float, dtype: torch.dtype, gate: Tensor | None = None) -> Tensor:
    """Return x (..., [G,] W) divided by its root mean square over W, times the gain ([G,] W), in a dtype. With a gate,
    in the shape of x, it is multiplied by its SiLU."""
    rows, gates = (None if each is None else _in_rows(each, gain.numel()) for each in (x, gate))
    return _Norm.apply(rows, gain, gates, epsilon, dtype).view(x.shape)  # type: ignore[no-any-return]


def swiglu(x: Tensor) -> Tensor:
    """Return silu(gate) * value (..., W) of x (..., 2 W), the gate and then the value."""
    return _SwiGLU.apply(_in_rows(x, x.shape[-1])).view(*x.shape[:-1], -1)  # type: ignore[no-any-return]


def convolution(x: Tensor, tail: Tensor, weight: Tensor, positions: Tensor | None) -> Tensor:
    """Return sum_i w_i x_(t-i) (B, T, W) of x (B, T, W), which follows the tail (B, taps - 1, W), with weights
    (W, taps), the oldest first. `positions` (B, T), if given, are the earlier tokens of the same document, of which
    alone an output is a sum."""
    return _Convolution.apply(x, tail, weight.mT.contiguous(), positions)  # type: ignore[no-any-return]


def loss(logits: Tensor, targets: Tensor, graded: bool) -> Tensor:
    """Return -log p of each target (N,), 0 if ignored. If `graded`, replace the logits (N, W) by their gradients."""
    assert logits.is_contiguous() and targets.shape == logits.shape[:1]
    targets = targets.long().contiguous()
    nll = logits.new_empty(len(logits), dtype=torch.float32)
    rows = {"x": logits, "dx": logits}
    _run("rows_loss", 1, logits.shape[1], rows, targets=targets, nll=nll, graded=graded)
    return nll


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, gate: Tensor | None, epsilon: float, dtype: torch.dtype) -> Tensor:
        y, gain = torch.empty(x.shape, dtype=dtype), gain.contiguous()
        ctx.save_for_backward(x, gain, gate)
        ctx.epsilon = epsilon
        _run("rows_norm", *_groups(gain), {"x": x, "y": y, "gate": gate}, gain=gain, epsilon=epsilon)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gain, gate = ctx.saved_tensors
        dx, dgate = (None if each is None else torch.empty(each.shape, dtype=each.dtype) for each in (x, gate))
        dgain = gain.new_empty(-(-len(x) // BLOCK_ROWS), *gain.shape)
        rows = {"x": x, "y": _in_rows(dy, x.shape[1]), "gate": gate, "dx": dx, "dgate": dgate}
        _run("rows_norm_backward", *_groups(gain), rows, gain=gain, dgain=dgain, epsilon=ctx.epsilon)
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


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tail: Tensor, weight: Tensor, positions: Tensor | None) -> Tensor:
        positions = None if positions is None else positions.contiguous()
        saved, y = (x, tail, weight, positions), torch.empty(x.shape, dtype=x.dtype)
        ctx.save_for_backward(*saved)
        _run_convolution("rows_convolution", saved, y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, tail, weight, _ = saved = ctx.saved_tensors  # once: activation checkpointing recomputes them
        dx, dtail = (torch.empty(each.shape, dtype=each.dtype) for each in (x, tail))
        dweight = weight.new_empty(-(-dy.shape[:2].numel() // BLOCK_ROWS), *weight.shape)
        more = {"dx": _in_rows(dx, dy.shape[2]), "dtail": _in_rows(dtail, dy.shape[2])}
        _run_convolution("rows_convolution_backward", saved, dy, more, dgain=dweight)
        return dx, dtail, dweight.sum(0), None


def _run_convolution(
    function: str, saved: Sequence[Any], y: Tensor, more: Mapping[str, Tensor] = NOTHING, **plain: Tensor
) -> None:
    x, tail, weight, positions = saved
    taps, width = weight.shape
    rows = {name: _in_rows(each, width) for name, each in (("x", x), ("tail", tail), ("y", y))}
    shared = {"gain": weight, "positions": positions, "time": x.shape[1], "taps": taps}
    _run(function, 1, width, {**rows, **more}, **shared, **plain)


def _in_rows(x: Tensor, width: int) -> Tensor:
    """Return x in contiguous rows (N, width), which are a view of x if its strides allow that."""
    rows = x.reshape(-1, width)
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _groups(gain: Tensor) -> tuple[int, int]:
    return gain.numel() // gain.shape[-1], gain.shape[-1]


def _run(function: str, groups: int, width: int, rows: Mapping[str, Tensor | None], **plain: Any) -> None:
    """Run a function of the library on tensors in rows, and on plain numbers and contiguous tensors, by their fields of
    the job."""
    x = rows["x"]
    assert x is not None
    job = RowsJob(rows=len(x), groups=groups, width=width)
    for name, tensor in rows.items():
        if tensor is not None:
            setattr(job, name, Rows(tensor.data_ptr(), tensor.stride(0), tensor.dtype == torch.bfloat16))
    for name, value in plain.items():
        assert not isinstance(value, Tensor) or value.is_contiguous()
        setattr(job, name, value.data_ptr() if isinstance(value, Tensor) else value)
    workers = max(1, min(torch.get_num_threads(), -(-len(x) // BLOCK_ROWS)))
    run_on_threads(getattr(library(), function), job, workers)
