"""The causal scan by native code on a CPU: a span at a time, all heads and rows shared out among the threads.

B batch, H heads, T time, F features, E value width.
"""

import torch
from torch import Tensor

from lmlong.attention import chunked, spans
from lmlong.attention.features import Elu, Relu
from lmlong.attention.native.library import Job, Library, Rows, library
from lmlong.attention.spans import Done, Features, Given, Inputs, Mapped, Outputs, Slopes

FUSED = {Given: 0, Elu: 1, Relu: 2}
"""Maps that are computed within the native code, by their numbers there; torch makes the features of all others."""

READ = (torch.float32, torch.bfloat16)


def attend(features: Features, inputs: Inputs, S: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What `chunked.attend` gives, which is left other devices, other types, and machines without a compiler."""
    fits = S.device.type == "cpu" and S.dtype == torch.float32 and all(x.dtype in READ for x in inputs[:3])
    if fits and (compiled := library()):
        return spans.attend(Native(compiled), features, inputs, S, z)
    return chunked.attend(features, inputs, S, z)


class Native:
    """A span by native code."""

    def __init__(self, compiled: Library):
        self._compiled = compiled

    def read(self, features: Features, inputs: Inputs, state: Tensor, into: Outputs) -> Tensor:
        if not _fused(features):
            inputs = inputs._replace(q=features.query(inputs.q), k=features.key(inputs.k))
        after = torch.empty_like(state)
        self._run("read_lines", features, inputs, into, state, after=after)
        return after

    def find_slopes(self, features: Features, weights: list[Tensor], done: Done, into: Slopes) -> Tensor:
        inputs, outputs, state, dy, dstate = done
        dq, dk, dv, _, dlog_decay = into.inputs
        mapped = None
        if not _fused(features):
            mapped = Mapped(features, weights, inputs.q, inputs.k)
            inputs = inputs._replace(q=mapped.fq, k=mapped.fk)
            dq, dk = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (mapped.fq, mapped.fk))
        before = torch.empty_like(dstate)
        slopes = {"dy": dy, "dq": dq, "dk": dk, "dv": dv, "dlog_decay": dlog_decay}
        states = {"dafter": dstate, "dbefore": before}
        self._run("find_slopes_of_lines", features, inputs, outputs, state, **slopes, **states)
        if mapped:
            for place, slope in zip(into.inputs[:2], mapped.back(dq, dk, into.weights), strict=True):
                place.copy_(slope)
        return before

    def _run(
        self, name: str, features: Features, inputs: Inputs, outputs: Outputs, state: Tensor, **others: Tensor | None
    ) -> None:
        batch, heads, time = inputs.q.shape[:3]
        widths = state.shape[2], state.shape[3] - 1
        workers = min(torch.get_num_threads(), batch * heads)
        scratch = state.new_empty(workers, self._compiled.scratch_size(time, *widths))
        job = Job(batch * heads, heads, time, *widths, FUSED.get(type(features), 0))
        job.scratch_size = scratch.shape[1]
        tensors = {**inputs._asdict(), **outputs._asdict(), **others, "before": state, "scratch": scratch}
        # `held` keeps copies alive while the job reads them
        held = {name: _in_rows(x) for name, x in tensors.items() if x is not None}
        for field, x in held.items():
            setattr(job, field, x.data_ptr() if field in POINTERS else _rows(x))
        self._compiled.run(name, job, workers)


POINTERS = {"before", "after", "dbefore", "dafter", "scratch"}
"""Fields of a job that are bare addresses, of tensors in one piece."""


def _fused(features: Features) -> bool:
    return type(features) in FUSED


def _in_rows(x: Tensor) -> Tensor:
    """The same, copied if the numbers of a token do not lie side by side."""
    return x if x.ndim < 4 or x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _rows(x: Tensor) -> Rows:
    """Of (B, H, T, ...), or of starts (B, T)."""
    row, head, token = (x.stride(0), 0, x.stride(1)) if x.ndim == 2 else x.stride()[:3]
    return Rows(x.data_ptr(), row, head, token, x.dtype == torch.bfloat16)
