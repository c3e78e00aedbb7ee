"""Ctrl-C, SIGTERM and SIGHUP: the first ends training after the current step, saved; the same one again ends it at
once."""

import os
import signal
import stat
import sys
import threading
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lmlong.training.distributed import all_reduce_max, is_main_process

HANGUP = getattr(signal, "SIGHUP", None)  # Windows has none
STOPPING = tuple(number for number in (signal.SIGINT, signal.SIGTERM, HANGUP) if number is not None)


class StopAtOnce(BaseException):
    """The same signal came twice; no KeyboardInterrupt, for which Lightning ends the process and ignores Ctrl-C."""

    def __init__(self, signal_number: int):
        super().__init__(signal_number)
        self.signal_number = signal_number


class StopOnSignal(Callback):
    """A callback that stops all ranks together at the end of a step, after a signal that came `with` it.

    Signals reach the main thread alone, so in another thread no signal stops a run.
    """

    def __init__(self, processes: int = 1) -> None:
        self.processes = processes
        self.received = 0  # by this process; never reset
        self.agreed: int | None = None  # the signal that all ranks stop for
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopOnSignal":
        if threading.current_thread() is threading.main_thread():
            handlers = {number: signal.getsignal(number) for number in STOPPING}
            self._before = {number: handler for number, handler in handlers.items() if handler is not None}
        self._install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._install()  # again, for Lightning has put a handler of its own before this one

    def agree(self, trainer: Trainer) -> bool:
        """Return, on all ranks, whether any rank received a signal; all ranks call this together.

        A signal that comes during the exchange is not lost: it counts in the next one.
        """
        self.agreed = all_reduce_max(trainer, self.received) or None
        return self.agreed is not None

    def _install(self) -> None:
        for number, handler in self._before.items():
            if handler != signal.SIG_IGN or number != HANGUP:  # nohup ignores it
                signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == HANGUP:  # the reader is gone: writing to a terminal or a pipe would fail
            self._turn_away()
        elif self.received == number and self.processes > 1:  # to leave in order, each rank would wait for the others
            os._exit(128 + number)
        elif self.received == number:
            raise StopAtOnce(number)
        first, self.received = not self.received, number
        if first and is_main_process():
            with suppress(OSError, RuntimeError):  # the stream is being written to, and takes no more
                print("\nstopping after this step; once more to stop at once", file=sys.stderr, flush=True)

    @staticmethod
    def _turn_away() -> None:
        """Redirect further output to nowhere, unless it goes into a file."""
        for descriptor in (1, 2):
            with suppress(OSError):
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
