"""The processes of a run watch each other: if one is lost, the others say which, and end instead of waiting for it.

Gloo reports a connection that is closed. NCCL waits in a collective for ten minutes, and neither of them notices a
process that is stopped or a machine that is cut off. A shorter limit of the collectives would end slow steps too. So a
thread of each rank counts in the run's store for as long as its process lives, and another thread looks whether all
ranks still count.
"""

import math
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from datetime import timedelta
from threading import Event, Thread
from typing import Any

from lightning.pytorch import Trainer
from torch import distributed

from lmlong.errors import LmlongError, UsageError
from lmlong.training.distributed import is_main_process, launcher

PARENT = os.getppid()
"""The process that started this one."""

SECONDS = "LMLONG_LOST_AFTER"
"""The environment variable that holds the seconds after which a silent rank is lost; "inf" if it never is."""

DEFAULT_SECONDS = 45.0

LOOKS = 15
"""Number of times that a rank is looked at in these seconds. Looks are counted, since a process that was itself stopped
for a while, as by Ctrl-Z, has heard nothing of the others either."""

PATIENCE = 5
"""Number of looks after which a process ends that knows by the system that another one has ended: the others may end
with the same error by themselves."""

DISCONNECTED = ("Connection closed by peer", "Connection reset by peer", "remote process exited")
"""Errors that gloo and NCCL report when another process has ended."""

FINISHED = -(10**12)
"""What a rank that has finished the run adds to its count."""

AGAIN = "The others have ended too: resume from the last checkpoint with --resume auto."


class Watch:
    """A block in which the processes of a run train, and end if one of them is lost."""

    def __init__(self, trainer: Trainer, processes: int):
        self.trainer, self.processes = trainer, processes
        self.seconds = _seconds() if processes > 1 else math.inf
        self.every = self.seconds / LOOKS
        self.lost: str | None = None
        self.children: list[subprocess.Popen[Any]] = []  # ranks from 1 on, started by this one
        self.answers, self.counts = 0, [0] * processes  # of the store
        self._threads = [Thread(target=loop, daemon=True) for loop in (self._count, self._look)]
        self._left, self._is_finished, self._is_waiting = Event(), False, False

    def __enter__(self) -> None:
        if self.seconds < math.inf:
            for thread in self._threads:
                thread.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        """Raise an LmlongError instead of the error of a connection to a process that was lost."""
        why = self._explain(error) if isinstance(error, RuntimeError) and self.processes > 1 else None
        self._is_finished = error is None
        self._left.set()
        if self.seconds < math.inf:
            for thread in self._threads:
                thread.join(self.every)
        if why:
            raise LmlongError(why) from error

    def _explain(self, error: RuntimeError) -> str | None:
        """Return which process was lost; None if the error has another cause."""
        self._is_waiting = True
        is_disconnected = any(words in str(error) for words in DISCONNECTED)
        # the silence of a process that this one has not started takes its time
        by_silence = is_disconnected and self.seconds < math.inf
        patience = time.monotonic() + (self.seconds + 2 * self.every if by_silence else 1.0)
        while not (why := self._ended_process() or self.lost) and time.monotonic() < patience:
            time.sleep(0.05)
        if why:
            self._end_children()
        elif is_disconnected:
            rank = self.trainer.global_rank
            why = f"another process of the run has ended, see its messages; this is rank {rank}. {AGAIN}"
        return why

    def _count(self) -> None:
        """Count in the store of the run, as soon as there is one, and read how far the other ranks have counted."""
        while not distributed.is_initialized():
            if self._left.wait(self.every):
                return
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        timeout, attempt = timedelta(seconds=self.seconds), os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
        names = [f"lmlong/{attempt}/{rank}" for rank in range(self.processes)]
        while not self._left.is_set():
            with suppress(RuntimeError):  # the store does not answer
                # a connection of its own, since one is blocked while it waits for an answer
                self._count_in(distributed.TCPStore(address, port, is_master=False, timeout=timeout), names)
            self._left.wait(self.every)

    def _count_in(self, store: Any, names: list[str]) -> None:
        for name in names:
            store.add(name, 0)  # a name that does not exist would be waited for
        while not self._left.wait(self.every):
            store.add(names[self.trainer.global_rank], 1)
            self.counts = [int(count) for count in store.multi_get(names)]
            self.answers += 1
        if self._is_finished:
            store.add(names[self.trainer.global_rank], FINISHED)

    def _look(self) -> None:
        """End this process as soon as another one is lost. This thread waits for nothing but time."""
        answers, counts = self.answers, self.counts
        silent, ended = [0] * self.processes, 0
        while not self._left.wait(self.every):
            self._take_children()
            ended = ended + 1 if (why := self._ended_process()) else 0
            if why and ended >= PATIENCE:
                self._end(why)
            before, (answers, counts) = (answers, counts), (self.answers, self.counts)
            for rank in range(self.processes if distributed.is_initialized() else 0):
                is_heard = counts[rank] < 0 or counts[rank] != before[1][rank]
                # if the store does not answer, it is rank 0, where the store is, that is silent
                silent[rank] = 0 if is_heard else silent[rank] + (answers != before[0] or rank == 0)
                if silent[rank] >= LOOKS:
                    self._end(self._silent(rank))

    def _silent(self, rank: int) -> str:
        return (
            f"rank {rank} of {self.processes} has not responded for {self.seconds:g} seconds: its process is stopped, "
            f"or its machine is down or unreachable. {AGAIN}"
        )

    def _end(self, why: str) -> None:
        """End this process at once, unless its main thread is about to."""
        self.lost = why
        if self._is_waiting:
            return
        self._end_children()
        with suppress(OSError):
            print(f"error: {why}", file=sys.stderr, flush=True)
        os._exit(LmlongError.exit_code)

    def _ended_process(self) -> str | None:
        """Return which process has ended that this one has started, or by which it was started."""
        if launcher() is not None:
            return None
        if not is_main_process():
            return None if os.getppid() == PARENT else f"rank 0, which started this one, has ended. {AGAIN}"
        ended = {
            rank: code for rank, child in enumerate([*self.children, *self._of_launcher()], 1) if (code := child.poll())
        }
        killed = {rank: code for rank, code in ended.items() if code < 0}
        for rank, code in (killed or ended).items():
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            memory = ", as the system does when memory is short" if code == -signal.SIGKILL else ""
            return f"rank {rank} of {self.processes} {how}{memory}. {AGAIN}"
        return None

    def _take_children(self) -> None:
        """Take the processes of Lightning's launcher from it: a few seconds after one of them has ended, it would kill
        all, this one too, without a word."""
        while started := self._of_launcher():
            self.children.append(started.pop(0))

    def _of_launcher(self) -> list[subprocess.Popen[Any]]:
        """Return the processes that Lightning's launcher has started and still has."""
        return getattr(self.trainer.strategy.launcher, "procs", [])

    def _end_children(self) -> None:
        """End all processes that this one has started, also those that are stopped."""
        for child in [*self.children, *self._of_launcher()]:
            child.kill()


def _seconds() -> float:
    """Return the seconds after which a silent rank is lost."""
    text = os.environ.get(SECONDS, DEFAULT_SECONDS)
    with suppress(ValueError):
        if (seconds := float(text)) > 0:
            return seconds
    raise UsageError(f"{SECONDS} is {text!r}, not a number of seconds. Give one, or inf.")
