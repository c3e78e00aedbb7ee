"""n-gram attention over many tokens by native code on a CPU, with heads and rows divided among the threads.

B batch, H heads, T time, V value dim, R rows.
"""

import ctypes
from collections.abc import Mapping
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
        *ints("is_scratch", "workers_begun", "batch_heads_begun", "invalid"),
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
        rows = state.S.shape[2]
        sums, numbers, *table = _Lookup.apply(functions, v.float(), hashes, document_starts, rows, *state[:3])
        S, number, ngram = table
        return sums, numbers, state._replace(S=S, number=number, ngram=ngram)

    def read_alone(
        self, v: Tensor, hashes: Tensor, document_starts: Tensor | None, buckets: int
    ) -> tuple[Tensor, Tensor]:
        if v.device.type != "cpu" or v.dtype == torch.float64 or (functions := library()) is None:
            return super().read_alone(v, hashes, document_starts, buckets)
        return _Lookup.apply(functions, v.float(), hashes, document_starts, buckets)  # type: ignore[no-any-return]


class _Lookup(torch.autograd.Function):
    """Returns the sums and numbers of `read`, and the table after if there is one before."""

    @staticmethod
    def forward(
        ctx: Any,
        functions: ctypes.CDLL,
        v: Tensor,
        hashes: Tensor,
        document_starts: Tensor | None,
        rows: int,
        *table: Tensor,
    ) -> tuple[Tensor, ...]:
        v, hashes = _by_token(v), hashes.contiguous()
        document_starts = None if document_starts is None else document_starts.bool().contiguous()
        batch, time, heads, value_dim = v.shape
        numbers = v.new_empty(batch, heads, time)
        cleared = v.new_empty(batch, heads, time, dtype=torch.bool)
        sums = torch.empty_like(v)
        shape = (batch, heads, rows) if table else (_workers(batch * heads), rows)
        before = zip(("S_before", "number_before", "ngram_before"), (x.contiguous() for x in table), strict=False)
        after = {
            "S_after": untouched_zeros((*shape, value_dim), v.device, v.dtype),
            "number_after": torch.zeros(shape, dtype=torch.int32),
            "ngram_after": torch.full(shape, NO_NGRAM),
        }
        saved = {"hashes": hashes, "document_starts": document_starts, "numbers": numbers, "cleared": cleared}
        _run(functions.ngram_forward, v, rows, {**saved, **dict(before), **after, "v": v, "sums": sums}, not table)
        ctx.functions, ctx.rows = functions, rows
        ctx.save_for_backward(v.new_empty(value_dim), *saved.values())
        ctx.set_materialize_grads(False)
        results = sums.transpose(1, 2), numbers
        if not table:
            ctx.mark_non_differentiable(numbers)
            return results
        ctx.mark_non_differentiable(numbers, after["number_after"], after["ngram_after"])
        return *results, *after.values()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dsums: Tensor | None, _: Any, dS: Tensor | None = None, *__: Any) -> tuple[Any, ...]:
        of_token, hashes, document_starts, numbers, cleared = ctx.saved_tensors
        batch, heads, time = numbers.shape
        dv = of_token.new_empty(batch, time, heads, len(of_token))
        dsums = torch.zeros_like(dv) if dsums is None else _by_token(dsums)
        of_table = ctx.needs_input_grad[5:]
        is_scratch = dS is None and not any(of_table)
        tables = (_workers(batch * heads),) if is_scratch else (batch, heads)
        shape = (*tables, ctx.rows, len(of_token))
        dS = untouched_zeros(shape, dv.device, dv.dtype) if dS is None else dS.contiguous().clone()
        saved = {"hashes": hashes, "document_starts": document_starts, "numbers": numbers, "cleared": cleared}
        _run(ctx.functions.ngram_backward, dv, ctx.rows, {**saved, "dsums": dsums, "dv": dv, "dS": dS}, is_scratch)
        gradients = (dS if needed else None for needed in of_table)
        return None, dv.transpose(1, 2), None, None, None, *gradients


def _workers(batch_heads: int) -> int:
    return max(1, min(torch.get_num_threads(), batch_heads))


def _run(function: Any, v: Tensor, rows: int, tensors: Mapping[str, Tensor | None], is_scratch: bool) -> None:
    """Run a pass over tensors (B, T, H, V) and (B, H, T), named by their job fields."""
    batch, time, heads, value_dim = v.shape
    job = NgramJob(batch * heads, heads, time, value_dim, rows, is_scratch=is_scratch)
    for name, x in tensors.items():
        setattr(job, name, None if x is None else x.data_ptr())
    run_on_threads(function, job, _workers(batch * heads))
    if job.invalid:
        raise IndexError("n-gram attention: a hash is out of range, so it has no row of the table")


def _by_token(x: Tensor) -> Tensor:
    """Return (B, H, T, V) as (B, T, H, V), the memory layout of a model's projections."""
    return x.transpose(1, 2).contiguous()
