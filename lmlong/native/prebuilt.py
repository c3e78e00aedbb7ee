"""Libraries that a wheel contains, for machines without a compiler: which processors they are for, and which is used.

A file is named by the key of its code, so it is found only for the very sources and headers that it was compiled from.
"""

import platform
import sys
from pathlib import Path
from typing import NamedTuple

from lmlong.native.source import NativeCode

FOLDER = Path(__file__).parent / "prebuilt"
"""A folder for each level. Wheels for Linux have it; tools/release fills it."""


class Level(NamedTuple):
    """A set of processors."""

    machine: str
    """As `platform.machine()` reports it."""
    flags: tuple[str, ...]
    """Of the compiler."""
    features: set[str]
    """What the processor must have, as /proc/cpuinfo lists it."""


V3 = {"cx16", "lahf_lm", "popcnt", "pni", "ssse3", "sse4_1", "sse4_2", "xsave"}
V3 |= {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"}
V4 = V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}

LEVELS = {
    "x86-64-v4-vnni": Level("x86_64", ("-march=x86-64-v4", "-mavx512vnni"), V4 | {"avx512_vnni"}),
    "x86-64-v4": Level("x86_64", ("-march=x86-64-v4",), V4),
    "x86-64-v3-vnni": Level("x86_64", ("-march=x86-64-v3", "-mavxvnni"), V3 | {"avx_vnni"}),
    "x86-64-v3": Level("x86_64", ("-march=x86-64-v3",), V3),
    "armv8.2-dotprod": Level("aarch64", ("-march=armv8.2-a+dotprod",), {"asimd", "atomics", "asimddp"}),
    "armv8": Level("aarch64", ("-march=armv8-a",), {"asimd"}),
}
"""The best of each machine first."""

WASM = "wasm32"
"""Stands for web browsers among the levels."""


class Prebuilt(NamedTuple):
    level: str
    path: Path


def find(code: NativeCode) -> Prebuilt | None:
    """Return the best library of this code for this processor, or None."""
    for level in suitable_levels(processor_features()):
        path = library_path(FOLDER, level, code)
        if path.is_file():
            return Prebuilt(level, path)
    return None


def library_path(folder: Path, level: str, code: NativeCode) -> Path:
    return folder / level / f"{code.key()}.{'wasm' if level == WASM else 'so'}"


def suitable_levels(features: frozenset[str]) -> list[str]:
    """Return the levels that a processor of this machine has, the best first."""
    if sys.platform != "linux":
        return []
    machine = platform.machine()
    return [name for name, level in LEVELS.items() if level.machine == machine and level.features <= features]


def processor_features() -> frozenset[str]:
    """Return the instruction sets as Linux lists them; empty on other systems."""
    _, _, features = processor().partition(":")
    return frozenset(features.split())


def processor() -> str:
    """Return a text that is the same on processors with the same instruction sets."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), platform.machine())
