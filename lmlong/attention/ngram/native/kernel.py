"""n-gram attention over many tokens by native code on a CPU, with heads and rows divided among the threads.

B batch, H heads, T time, V value dim, R rows.
"""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lmlong.attention.native_kernel import no_native_code
from lmlong.attention.ngram.hashing import BITS, GOLDEN, MULTIPLIER, NO_NGRAM
from lmlong.attention.ngram.sort import SortKernel
from lmlong.attention.ngram.state import NgramState, untouched_zeros
from lmlong.native.build import NativeLibrary, load
from lmlong.native.decode.structures import ints, pointers
from lmlong.native.source import NativeCode, Shared
from lmlong.native.threads import run_on_threads

CODE = Path(__file__).parent
INTEGERS = {"HASH_BITS": BITS, "HASH_MULTIPLIER": MULTIPLIER, "HASH_GOLDEN": GOLDEN, "NO_NGRAM": NO_NGRAM}


class NgramJob(ctypes.Structure):
    """The arguments of a scan; its fields are explained in scan.cpp."""

    _fields_ = (
        *ints("batch_heads", "heads", "time", "value_dim", "rows"),
        *pointers("hashes", "document_starts", "v", "sums", "numbers", "cleared"),
        *pointers("S_before", "number_before", "ngram_before", "S_after", "number_after", "ngram_after"),
        *pointers("dsums", "dv", "dS"),
        *ints("dS_is_scratch", "workers_begun", "batch_heads_begun", "invalid"),
    )


def code() -> NativeCode:
    return NativeCode(CODE, Shared({}, [], [NgramJob], INTEGERS))


@cache
def library() -> NativeLibrary | None:
    """Return the library, or None if native code is unavailable."""
    return load(code(), "n-gram attention is computed by torch, slower")


class NativeNgram(SortKernel):
    """The lookup of many n-grams by native code. Torch computes other devices and dtypes, and without a compiler."""

    name = "native"

    @classmethod
    def unavailable_reason(cls, attention: nn.Module, device: torch.device) -> str | None:
        return no_native_code(device, library)

    def read(
        self, v: Tensor, hashes: Tensor, document_starts: Tensor | None, state: NgramState
    ) -> tuple[Tensor, Tensor, NgramState]:
        if v.device.type != "cpu" or state.S.dtype != torch.float32 or (functions := library()) is None:
            return super().read(v, hashes, document_starts, state)
        sums, numbers, S, number, ngram = _Lookup.apply(functions, v.float(), hashes, document_starts, *state[:3])
        return sums, numbers, state._replace(S=S, number=number, ngram=ngram)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, functions: ctypes.CDLL, v: Tensor, hashes: Tensor, document_starts: Tensor | None, *table: Tensor
    ) -> tuple[Tensor, ...]:
        S, number, ngram = table
        v, hashes = _by_token(v), hashes.contiguous()
        document_starts = None if document_starts is None else document_starts.bool().contiguous()
        batch, time, heads, _ = v.shape
        numbers = v.new_empty(batch, heads, time)
        cleared = v.new_empty(batch, heads, time, dtype=torch.bool)
        sums, S_after = torch.empty_like(v), untouched_zeros(S.shape, S.device, S.dtype)
        number_after, ngram_after = number.new_empty(number.shape), ngram.new_full(ngram.shape, NO_NGRAM)
        saved = {"hashes": hashes, "document_starts": document_starts, "numbers": numbers, "cleared": cleared}
        before = {"S_before": S, "number_before": number, "ngram_before": ngram}
        after = {"S_after": S_after, "number_after": number_after, "ngram_after": ngram_after}
        before = {name: x.contiguous() for name, x in before.items()}
        _run(functions.ngram_forward, v, S.shape[2], {**saved, **before, **after, "v": v, "sums": sums})
        ctx.functions, ctx.rows = functions, S.shape[2]
        ctx.save_for_backward(v.new_empty(v.shape[-1]), *saved.values())
        ctx.mark_non_differentiable(numbers, number_after, ngram_after)
        ctx.set_materialize_grads(False)
        return sums.transpose(1, 2), numbers, S_after, number_after, ngram_after

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dsums: Tensor | None, _: Any, dS: Tensor | None, *__: Any) -> tuple[Tensor | None, ...]:
        of_token, hashes, document_starts, numbers, cleared = ctx.saved_tensors
        batch, heads, time = numbers.shape
        dv = of_token.new_empty(batch, time, heads, len(of_token))
        dsums = torch.zeros_like(dv) if dsums is None else _by_token(dsums)
        is_scratch = dS is None and not ctx.needs_input_grad[4]
        tables = (_workers(batch * heads),) if is_scratch else (batch, heads)
        shape = (*tables, ctx.rows, len(of_token))
        dS = untouched_zeros(shape, dv.device, dv.dtype) if dS is None else dS.contiguous().clone()
        saved = {"hashes": hashes, "document_starts": document_starts, "numbers": numbers, "cleared": cleared}
        _run(ctx.functions.ngram_backward, dv, ctx.rows, {**saved, "dsums": dsums, "dv": dv, "dS": dS}, is_scratch)
        return None, dv.transpose(1, 2), None, None, dS if ctx.needs_input_grad[4] else None, None, None


def _workers(batch_heads: int) -> int:
    return max(1, min(torch.get_num_threads(), batch_heads))


def _run(
    function: Any, v: Tensor, rows: int, tensors: dict[str, Tensor | None], dS_is_scratch: bool = False
) -> None:
    """Run a pass over tensors (B, T, H, V) and (B, H, T), named by their job fields."""
    batch, time, heads, value_dim = v.shape
    job = NgramJob(batch * heads, heads, time, value_dim, rows, dS_is_scratch=dS_is_scratch)
    for name, x in tensors.items():
        setattr(job, name, None if x is None else x.data_ptr())
    run_on_threads(function, job, _workers(batch * heads))
    if job.invalid:
        raise IndexError("n-gram attention: a hash is out of range, so it has no row of the table")


def _by_token(x: Tensor) -> Tensor:
    """Return (B, H, T, V) as (B, T, H, V), the memory layout of a model's projections."""
    return x.transpose(1, 2).contiguous()
