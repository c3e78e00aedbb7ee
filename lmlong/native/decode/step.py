"""The C++ code of a decode step (step.cpp), for some kinds of attention."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lmlong.native.decode import structures
from lmlong.native.decode.kind import DecodeKind
from lmlong.native.decode.structures import DecodeJob, Dtype, FeatureMap, OutputGate, Pooling
from lmlong.native.source import NativeCode, Shared

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
    return NativeCode(
        CODE, Shared(floats, [Dtype, FeatureMap, OutputGate, Pooling], layouts, integers, kind_headers(kinds))
    )


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
