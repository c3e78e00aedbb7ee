"""One decode step of a packed model in C++ (step.cpp). B batch, V vocabulary."""

import ctypes
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lmlong.native.build import NativeLibrary, load
from lmlong.native.decode import structures
from lmlong.native.decode.kind import DecodeKind
from lmlong.native.decode.structures import DecodeJob, Dtype, LayerState, Pooling
from lmlong.native.feature_maps import FeatureMap
from lmlong.native.source import NativeCode, Shared
from lmlong.native.threads import give_barrier, run_on_threads

CODE = Path(__file__).parent

Integers = Tensor | array
"""int64 numbers. Those of a few tokens are fastest as plain numbers."""


class States(NamedTuple):
    """The state of a model before a step, which is read, or after it, which is written."""

    layers: array
    """The fields of each layer's `LayerState` and of its attention's state. Plain numbers, since each token needs many
    new ones. If each row has its own state, the layers of one row follow another's."""
    hourglass: Sequence[Tensor] | None  # HourglassState, in hourglass.py
    last_tokens: Integers | None


def step_code(kinds: Iterable[DecodeKind[Any]], constants: Mapping[str, float]) -> NativeCode:
    """Return the code of the step with these kinds of attention."""
    kinds = list(kinds)
    layouts = [structures.Matrix, structures.FeatureMapWeights, structures.Gate, structures.Forgetting]
    layouts += [structures.Layer, structures.Hourglass, structures.NgramTables, structures.Model, LayerState, DecodeJob]
    for kind in kinds:
        layouts += [each for each in (kind.weights, kind.state) if each._fields_]  # C++ gives an empty one a size
    constants = merged_constants(constants, kinds)
    integers = {name: value for name, value in constants.items() if isinstance(value, int)}
    floats = {name: value for name, value in constants.items() if name not in integers}
    return NativeCode(CODE, Shared(floats, [Dtype, FeatureMap, Pooling], layouts, integers, kind_headers(kinds)))


def load_step(code: NativeCode) -> NativeLibrary | None:
    """Return the library of a step; None if there is no native code for this machine."""
    functions = load(code, "tokens are written by torch, slower")
    if functions is not None:
        functions.scratch_size.argtypes = [ctypes.c_void_p, ctypes.c_int64]
        functions.scratch_size.restype = ctypes.c_int64
    return functions


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
    tokens: Integers,
    positions: Integers,
    before: States,
    after: States,
    workers: int,
    separate: bool = False,
    consecutive: bool = False,
) -> tuple[Tensor, Tensor, bool]:
    """Return the logits (B, V) and the last hidden states (B, width) after `tokens` (B,) at `positions` (B,) in their
    documents, and whether a state has no room for another token. Fill the states `after`, on `workers` threads.
    `separate`: each row has its own state. `consecutive`: each of these is the state `after` of the row before, so that
    the rows are the tokens of one text."""
    rows, vocabulary = len(tokens), model.output.outputs
    size = model.state_size * (rows if separate else 1)
    assert len(before.layers) * before.layers.itemsize == len(after.layers) * after.layers.itemsize == size
    logits, hidden = (torch.empty(rows, size, dtype=torch.float32, device="cpu") for size in (vocabulary, model.width))
    states = (address(state.layers) for state in (before, after))
    job = DecodeJob(ctypes.addressof(model), *states)
    if before.hourglass is not None and after.hourglass is not None:
        job.tail_before, job.upsampled_before = (x.data_ptr() for x in before.hourglass)
        job.tail_after, job.upsampled_after = (x.data_ptr() for x in after.hourglass)
    if before.last_tokens is not None and after.last_tokens is not None:
        job.last_tokens_before, job.last_tokens_after = map(address, (before.last_tokens, after.last_tokens))
    job.tokens, job.positions = address(tokens), address(positions)
    job.logits, job.hidden = logits.data_ptr(), hidden.data_ptr()
    job.rows, job.separate, job.consecutive = rows, separate, consecutive
    give_barrier(job, workers)
    size = functions.scratch_size(ctypes.byref(job), workers)
    scratch = torch.empty(size, dtype=torch.float32, device="cpu")
    job.scratch = scratch.data_ptr()
    run_on_threads(functions.decode_step, job, workers)
    if job.invalid:
        raise IndexError("decode: a token is not in the vocabulary, or a position is negative")
    return logits, hidden, bool(job.full)


def address(numbers: Integers) -> int:
    return numbers.buffer_info()[0] if isinstance(numbers, array) else numbers.data_ptr()
