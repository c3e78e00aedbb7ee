"""The threads of torch, and running native code on them."""

import ctypes
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple


class ThreadTeam(NamedTuple):
    """OpenMP's functions for a team of threads."""

    parallel: Any  # call a function on a number of threads
    barrier: Any  # wait until all threads are here
    thread_num: Any  # the number of the calling thread
    num_threads: Any


@cache
def thread_team() -> ThreadTeam | None:
    """Return the OpenMP of the very library that torch uses: threads of another would compete with torch's, which spin
    while they wait. None where torch was built without it, or with one that lacks these functions."""
    import torch

    suffix = ".dylib" if sys.platform == "darwin" else ".so"
    names = ("GOMP_parallel", "GOMP_barrier", "omp_get_thread_num", "omp_get_num_threads")
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / f"libtorch_cpu{suffix}"))
        team = ThreadTeam(*(library[name] for name in names))
    except (OSError, AttributeError):
        return None
    team.parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    team.parallel.restype = None
    return team


def set_threads(count: int) -> None:
    """Let torch compute with so many threads, in this process and in those that it starts; one that has not imported
    torch yet need not do so for this."""
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(count)
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(count)


def run_on_threads(function: Any, job: ctypes.Structure, workers: int) -> None:
    """Call a function with a job on `workers` threads."""
    team = thread_team()
    if workers > 1 and team is not None:
        team.parallel(function, ctypes.byref(job), workers, 0)
    else:
        function(ctypes.byref(job))
