"""From scan.cpp to functions that can be called."""

import ctypes
import os
import platform
import shutil
import subprocess
import warnings
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch

from lmlong.attention.chunks import FAINTEST
from lmlong.attention.features import ELU_FLOOR, Relu
from lmlong.attention.spans import SMALLEST
from lmlong.cache import build, cache_folder, key_of

SOURCES = sorted(path for path in Path(__file__).parent.iterdir() if path.suffix in (".h", ".cpp"))
FLAGS = ("-std=c++17", "-O3", "-march=native", "-shared", "-fPIC")
CONSTANTS = {"SMALLEST": SMALLEST, "FAINTEST": FAINTEST, "ELU_FLOOR": ELU_FLOOR, "RELU_FLOOR": Relu.FLOOR}
"""Numbers that are the same there and here."""
COMPILING = 300
"""Seconds that a compiler may take; two are usual."""


class Rows(ctypes.Structure):
    """A tensor of scan.cpp, by where it lies."""

    _fields_ = (("at", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("row", "head", "token", "halves")))


class Job(ctypes.Structure):
    """What scan.cpp is asked for; its fields are explained there."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("lines", "heads", "time", "features", "values", "map")),
        *((name, Rows) for name in ("q", "k", "v", "starts", "log_decay", "y", "denominators")),
        *((name, Rows) for name in ("dy", "dq", "dk", "dv", "dlog_decay")),
        *((name, ctypes.c_void_p) for name in ("before", "after", "dbefore", "dafter", "scratch")),
        *((name, ctypes.c_int64) for name in ("scratch_size", "worker", "line")),
    )


class Library:
    """The compiled scan."""

    def __init__(self, path: Path):
        self._functions = ctypes.CDLL(str(path))
        self.scratch_size = self._functions.scratch_size
        self.scratch_size.argtypes = [ctypes.c_int64] * 3
        self.scratch_size.restype = ctypes.c_int64

    def run(self, name: str, job: Job, workers: int) -> None:
        """Share the lines of a job out among so many threads, those that torch's own work is done by."""
        work = self._functions[name]
        if workers > 1 and self._team is not None:
            self._team(work, ctypes.byref(job), workers, 0)
        else:
            work(ctypes.byref(job))

    @cached_property
    def _team(self) -> Any:
        """OpenMP's function that lets a team of threads do something, in the very library that torch uses: the threads
        of another would compete with these, which wait for work without rest. None where torch was built without."""
        torchs = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
        try:
            team = ctypes.CDLL(str(torchs)).GOMP_parallel
        except (OSError, AttributeError):
            return None
        team.argtypes, team.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
        return team


@cache
def library() -> Library | None:
    """The library, compiled at its first use on a machine; None where there is no compiler."""
    compiler = find_compiler()
    if compiler is None:
        return None
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    folder = (
        cache_folder()
        / "native"
        / key_of([path.read_text() for path in SOURCES], FLAGS, CONSTANTS, compiler, version, _processor())
    )
    try:
        if not folder.is_dir():
            build(folder, lambda into: _compile(compiler, into / "scan.so"))
        return Library(folder / "scan.so")
    except (OSError, subprocess.SubprocessError) as error:
        why = getattr(error, "stderr", None) or str(error)
        message = f"linear attention is computed by torch, slower, for {compiler} made no native code:\n{why[:1000]}"
        warnings.warn(message, stacklevel=2)
        return None


def find_compiler() -> str | None:
    """A C++ compiler: $CXX, g++ or clang++."""
    return next(filter(None, map(shutil.which, [os.environ.get("CXX", "g++"), "g++", "clang++"])), None)


def _compile(compiler: str, into: Path) -> None:
    command = [
        compiler,
        *FLAGS,
        *_definitions(),
        *(str(path) for path in SOURCES if path.suffix == ".cpp"),
        "-o",
        str(into),
    ]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILING)


def _definitions() -> list[str]:
    return [f"-D{name}={value!r}f" for name, value in CONSTANTS.items()]


def _processor() -> str:
    """What code for this very processor depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), platform.machine())
