"""From a folder of C++ to functions that can be called."""

import atexit
import ctypes
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from lmlong.errors import UsageError
from lmlong.io.cache import cache_folder, fetch, home_cache, key_of
from lmlong.io.manifest import Format
from lmlong.io.trust import make_private

HERE = Path(__file__).parent
"""Where the headers are that all code shares."""
FLAGS = ("-std=c++17", "-O3", "-march=native", "-shared", "-fPIC")
LIBRARY, CODE = Format("native code", 1), "code.so"
COMPILING = 300
"""Seconds that a compiler may take; a few are usual."""


def compiled(folder: Path, constants: Mapping[str, float], otherwise: str) -> ctypes.CDLL | None:
    """The library made of the sources of a folder, once on each machine; None where there is no compiler, or with a
    warning that tells what is done `otherwise` where it fails. The constants are numbers that are the same there and
    here."""
    compiler = find_compiler()
    if compiler is None:
        return None
    sources = sorted(path for place in (HERE, folder) for path in place.iterdir() if path.suffix in (".h", ".cpp"))
    flags = [*FLAGS, f"-I{HERE}", *(f"-D{name}={value!r}f" for name, value in constants.items())]
    texts = [path.read_text() for path in sources]
    units = [str(path) for path in sources if path.suffix == ".cpp"]
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
        key = key_of(texts, FLAGS, dict(constants), compiler, version, _processor())
        made = fetch(
            private_place(cache_folder()) / key,
            LIBRARY,
            lambda into: _compile([compiler, *flags, *units, "-o", str(into / CODE)]),
            True,
        )
        return ctypes.CDLL(str(made / CODE))
    except (OSError, subprocess.SubprocessError, UsageError) as error:
        why = getattr(error, "stderr", None) or str(error)
        warnings.warn(f"{otherwise}, for {compiler} made no native code:\n{why[:1000]}", stacklevel=2)
        return None


@cache
def private_place(cache: Path) -> Path:
    """Where compiled code is kept: in the cache, or, where others can write to that and so exchange the code, in one of
    this user's own; where there is none, in a folder that goes with this process."""
    first, *others = dict.fromkeys([cache / "native", home_cache() / "native"])
    if make_private(first):
        return first.resolve()  # a link on the way could be exchanged
    for place in others:
        if make_private(place):
            place = place.resolve()
            break
    else:
        place = Path(tempfile.mkdtemp(prefix="lmlong-native-"))
        atexit.register(shutil.rmtree, place, ignore_errors=True)
    warnings.warn(f"{first}: others can write there, so native code is kept in {place}.", stacklevel=2)
    return place


def find_compiler() -> str | None:
    """A C++ compiler: $CXX, g++ or clang++."""
    return next(filter(None, map(shutil.which, [os.environ.get("CXX", "g++"), "g++", "clang++"])), None)


class Team(NamedTuple):
    """OpenMP's way to work with several threads."""

    work: Any  # lets so many threads call a function
    meet: Any  # where they wait for each other
    number: Any  # of the thread that asks
    count: Any  # of the threads there are


@cache
def team() -> Team | None:
    """OpenMP in the very library that torch uses: the threads of another would compete with these, which wait for work
    without rest. None where torch was built without, or with another that has no such names."""
    import torch

    torchs = Path(torch.__file__).parent / "lib" / ("libtorch_cpu" + (".dylib" if sys.platform == "darwin" else ".so"))
    names = ("GOMP_parallel", "GOMP_barrier", "omp_get_thread_num", "omp_get_num_threads")
    try:
        library = ctypes.CDLL(str(torchs))
        found = Team(*(library[name] for name in names))
    except (OSError, AttributeError):
        return None
    found.work.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    found.work.restype = None
    return found


def run(function: Any, job: ctypes.Structure, workers: int) -> None:
    """Have so many threads, those that torch's own work is done by, call a function with a job."""
    known = team()
    if workers > 1 and known is not None:
        known.work(function, ctypes.byref(job), workers, 0)
    else:
        function(ctypes.byref(job))


def _compile(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILING)


def _processor() -> str:
    """What code for this very processor depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), platform.machine())
