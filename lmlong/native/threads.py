"""The threads of torch, and running native code on them."""

import ctypes
import os
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

Result = TypeVar("Result")


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


def spare_busy_cores() -> None:
    """Let torch's threads sleep while they wait, where other programs keep the cores busy now: waiting in a loop, which
    is faster on idle cores, takes the time of the very threads that are waited for. To be called before torch is
    imported, which decides it for the process; the variables of OpenMP take precedence."""
    chosen = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys()
    if not chosen and "torch" not in sys.modules and cores_are_busy():
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


def cores_are_busy() -> bool:
    """Return whether other programs leave fewer cores idle than there are threads; False where the system, unlike
    Linux, does not tell."""
    cores = os.cpu_count() or 1
    threads = os.environ.get("OMP_NUM_THREADS", "")
    own = int(threads) if threads.isdecimal() else cores
    try:
        running = min(_running() for _ in range(3))
    except (OSError, ValueError, IndexError):
        return False
    return own > 1 and running - 1 + own > cores


def _running() -> int:
    """Return how many threads of all programs run or wait for a core, this one included."""
    time.sleep(0.005)
    return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])


class ThreadChoice:
    """The number of threads of a computation that is repeated: one, or all that torch has, whichever took less time
    when both were tried. Threads that wait for each other lose far more than they gain where other programs keep the
    cores busy, and whether they do changes: both are tried again after a while, a longer one if nothing changed."""

    TRIED, FIRST, LAST = 8, 256, 8192
    """Calls of a trial of each, and calls between trials, at first and at most."""

    def __init__(self) -> None:
        self.chosen = self._all = 0
        self._pause, self._left = self.FIRST, 0
        self._trial: list[int] = []  # the numbers of threads of the calls to come
        self._seconds: dict[int, float] = {}

    def run(self, call: Callable[[int], Result], all_threads: int) -> Result:
        """Return call(threads); the result must not depend on them."""
        if all_threads == 1:
            return call(1)
        if all_threads != self._all:
            self.chosen = self._all = all_threads
            self._pause, self._left, self._trial = self.FIRST, 0, []
        if not self._trial and not self._left:
            other = 1 if self.chosen == all_threads else all_threads
            self._trial = [self.chosen] * self.TRIED + [other] * self.TRIED
            self._seconds = {self.chosen: 0.0, other: 0.0}
        threads = self._trial[0] if self._trial else self.chosen
        begun = time.perf_counter()
        result = call(threads)
        self._note(threads, time.perf_counter() - begun)
        return result

    def _note(self, threads: int, seconds: float) -> None:
        if not self._trial:
            self._left -= 1
            return
        self._trial.pop(0)
        self._seconds[threads] += seconds
        other_lost = threads != self.chosen and self._seconds[threads] >= self._seconds[self.chosen]
        if other_lost or not self._trial:
            self._pause = min(2 * self._pause, self.LAST) if other_lost else self.FIRST
            self.chosen = self.chosen if other_lost else threads
            self._left, self._trial = self._pause, []


def run_on_threads(function: Any, job: ctypes.Structure, workers: int) -> None:
    """Call a function with a job on `workers` threads."""
    team = thread_team()
    if workers > 1 and team is not None:
        team.parallel(function, ctypes.byref(job), workers, 0)
    else:
        function(ctypes.byref(job))
