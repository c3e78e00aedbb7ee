"""Run native code on torch's threads."""

import ctypes
import os
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple


class ThreadTeam(NamedTuple):
    """OpenMP's functions for a team of threads."""

    parallel: Any  # call a function on a number of threads
    barrier: Any  # wait for all threads of the team
    thread_num: Any  # the index of the calling thread
    num_threads: Any


@cache
def thread_team() -> ThreadTeam | None:
    """Return the OpenMP functions of the library that torch uses. Threads of another OpenMP would compete with torch's,
    which spin while they wait. None if torch's library lacks these functions."""
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
    """Set the number of torch's threads in this process and its children. Does not import torch."""
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(count)
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(count)


def spare_busy_cores() -> None:
    """Make torch's threads sleep while they wait if other programs keep the cores busy. Spinning, which is faster on
    idle cores, takes time from the threads that are waited for. Call this before torch is imported: the policy is
    fixed then. OpenMP's environment variables take precedence."""
    set_by_user = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys()
    if not set_by_user and "torch" not in sys.modules and cores_are_busy():
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


def cores_are_busy() -> bool:
    """Return whether other programs leave fewer idle cores than torch has threads. False on systems other than Linux,
    which do not report it."""
    cores = os.cpu_count() or 1
    threads = os.environ.get("OMP_NUM_THREADS", "")
    own = int(threads) if threads.isdecimal() else cores
    try:
        running = min(_running() for _ in range(3))
    except (OSError, ValueError, IndexError):
        return False
    return own > 1 and running - 1 + own > cores


def _running() -> int:
    """Return how many threads of all programs, this one included, run or wait for a core."""
    time.sleep(0.005)
    return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])


class ThreadChoice:
    """The number of threads of a repeated computation: one or all of torch's, whichever was faster in a trial. Threads
    that wait for each other lose far more than they gain while other programs keep the cores busy. That changes, so the
    trial is repeated, after longer pauses while its result stays the same."""

    TRIAL_CALLS, FIRST_PAUSE, LONGEST_PAUSE = 8, 256, 8192
    """Calls with each number of threads in a trial; calls between trials."""

    def __init__(self) -> None:
        self.chosen = self._all = 0
        self._pause, self._left = self.FIRST_PAUSE, 0
        self._trial: list[int] = []  # the number of threads of each remaining call of a trial
        self._seconds: dict[int, float] = {}

    def threads(self, all_threads: int) -> int:
        """Return the number of threads of the next call, whose result must not depend on it."""
        if all_threads == 1:
            self._all = 0
            return 1
        if all_threads != self._all:
            self.chosen = self._all = all_threads
            self._pause, self._left, self._trial = self.FIRST_PAUSE, 0, []
        if not self._trial and not self._left:
            other = 1 if self.chosen == all_threads else all_threads
            self._trial = [self.chosen] * self.TRIAL_CALLS + [other] * self.TRIAL_CALLS
            self._seconds = {self.chosen: 0.0, other: 0.0}
        return self._trial[0] if self._trial else self.chosen

    def note(self, threads: int, seconds: float) -> None:
        """Note the time of a call with the number of threads that `threads` returned."""
        if not self._all:
            return
        if not self._trial:
            self._left -= 1
            return
        self._trial.pop(0)
        self._seconds[threads] += seconds
        other_lost = threads != self.chosen and self._seconds[threads] >= self._seconds[self.chosen]
        if other_lost or not self._trial:
            self._pause = min(2 * self._pause, self.LONGEST_PAUSE) if other_lost else self.FIRST_PAUSE
            self.chosen = self.chosen if other_lost else threads
            self._left, self._trial = self._pause, []


def run_on_threads(function: Any, job: ctypes.Structure, workers: int) -> None:
    """Call a function with a job on `workers` threads."""
    team = thread_team()
    if workers > 1 and team is not None:
        team.parallel(function, ctypes.byref(job), workers, 0)
    else:
        function(ctypes.byref(job))


def give_barrier(job: ctypes.Structure, workers: int) -> None:
    """Let `workers` threads wait for each other in a job, by the functions of `ThreadTeam` (thread_team.h)."""
    team = thread_team()
    if workers > 1 and team is not None:
        job.barrier, job.thread_num, job.num_threads = (
            ctypes.cast(x, ctypes.c_void_p) for x in (team.barrier, team.thread_num, team.num_threads)
        )
