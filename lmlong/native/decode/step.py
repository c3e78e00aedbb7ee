"""A pass of a packed model in C++ (step.cpp). B rows, N tokens of each row, P last tokens, V vocabulary."""

import ctypes
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmlong.native.decode import structures
from lmlong.native.decode.kind import DecodeKind
from lmlong.native.decode.structures import DecodeJob, Dtype, FeatureMap, Pooling
from lmlong.native.source import NativeCode, Shared
from lmlong.native.threads import give_barrier, run_on_threads

CODE = Path(__file__).parent


def step_code(kinds: Iterable[DecodeKind[Any]], constants: Mapping[str, float]) -> NativeCode:
    """Return the code of the step with these kinds of attention."""
    kinds = list(kinds)
    layouts = [structures.Matrix, structures.FeatureMapWeights, structures.Gate, structures.Forgetting]
    layouts += [structures.Layer, structures.Hourglass, structures.NgramTables]
    layouts += [structures.Rotation, structures.Model, structures.LayerState, structures.HourglassState, DecodeJob]
    for kind in kinds:
        layouts += [each for each in (kind.weights, kind.state) if each._fields_]  # C++ gives an empty one a size
    constants = merged_constants(constants, kinds)
    integers = {name: value for name, value in constants.items() if isinstance(value, int)}
    floats = {name: value for name, value in constants.items() if name not in integers}
    return NativeCode(CODE, Shared(floats, [Dtype, FeatureMap, Pooling], layouts, integers, kind_headers(kinds)))


def merged_constants(constants: Mapping[str, float], kinds: Iterable[DecodeKind[Any]]) -> dict[str, float]:
    """Return the constants of a model and of all kinds. Kinds may share a constant only with the same value."""
    merged = dict(constants)
    for kind in kinds:
        for name, value in kind.constants.items():
            assert merged.get(name, value) == value, (
                f"{kind.name}: {name} is {value}, but the model or another kind defines it as {merged[name]}"
            )
            merged[name] = value
    return merged


def kind_headers(kinds: Sequence[DecodeKind[Any]]) -> dict[str, str]:
    """Return the texts of all kinds' headers by name, and of kinds.h: it includes them, and calls a function with the
    kind at an index of `kinds`."""
    headers = {name: path.read_text() for kind in kinds for name, path in kind.headers.items()}
    lines = [
        "#pragma once",
        '#include "mixer.h"',
        *(f'#include "{name}"' for name in headers),
        "namespace {",
        "template <typename T> struct Kind { using Attention = T; };",
        "template <typename Call> void with_kind(Int kind, Call call) {",
        "    switch (kind) {",
        *(f"        case {number}: return call(Kind<{kind.name}>{{}});" for number, kind in enumerate(kinds)),
        "    }",
        "}",
        "}",
    ]
    return {**headers, "kinds.h": "\n".join(lines) + "\n"}


def decode(
    functions: ctypes.CDLL,
    model: structures.Model,
    tokens: array,
    positions: array,
    last_tokens: array,
    before: array,
    after: array,
    workers: int,
    rows: int,
) -> tuple[Tensor, Tensor, bool]:
    """Return the logits (B, N, V) and the last hidden states (B, N, width) after `tokens` (B * N,) at `positions` in
    their documents, and whether a state has no room for another token. Fill the states `after`, on `workers` threads.
    B or N is 1: the tokens are those of different rows, or consecutive ones of one row.

    The arrays have one int64 for each number. In `before` and `after`, the addresses of a row's state follow those of
    another. `last_tokens` (B * N, P) are those before each token."""
    shape = rows, len(tokens) // rows
    assert len(before) * before.itemsize == len(after) * after.itemsize == model.state_size * len(tokens)
    assert len(last_tokens) == model.past_tokens * len(tokens) and 1 in shape
    logits = torch.empty(*shape, model.output.outputs, dtype=torch.float32, device="cpu")
    hidden = torch.empty(*shape, model.width, dtype=torch.float32, device="cpu")
    inputs = [numbers.buffer_info()[0] for numbers in (before, after, tokens, positions, last_tokens)]
    job = DecodeJob(ctypes.addressof(model), *inputs)
    job.logits, job.hidden = logits.data_ptr(), hidden.data_ptr()
    job.rows, job.consecutive = len(tokens), shape[1] > 1
    give_barrier(job, workers)
    scratch = torch.empty(functions.scratch_size(ctypes.byref(job), workers), dtype=torch.float32, device="cpu")
    job.scratch = scratch.data_ptr()
    run_on_threads(functions.decode_step, job, workers)
    if job.invalid:
        raise IndexError("decode: a token is not in the vocabulary, or a position is negative")
    return logits, hidden, bool(job.full)
