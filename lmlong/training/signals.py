"""Ctrl-C, SIGTERM and SIGHUP: the first ends training after the current step, saved; the same one again ends it at
once."""

import os
import signal
import stat
import sys
from contextlib import suppress
from types import FrameType
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lmlong.training.distributed import all_reduce_max, is_main_process

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopOnSignal(Callback):
    """A callback that sets a flag when a signal comes, and stops all ranks together at the end of a step."""

    def __init__(self) -> None:
        self.received = 0  # by this process; never reset
        self.agreed: int | None = None  # the signal that all ranks stop for
        self._before: dict[int, Any] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for number in STOPPING:
            if signal.getsignal(number) != signal.SIG_IGN or number != signal.SIGHUP:  # nohup ignores it
                self._before[number] = signal.signal(number, self._receive)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restore()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._restore()

    def agree(self, trainer: Trainer) -> bool:
        """Return, on all ranks, whether any rank received a signal; all ranks call this together.

        A signal that comes during the exchange is not lost: it counts in the next one.
        """
        self.agreed = all_reduce_max(trainer, self.received) or None
        return self.agreed is not None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:  # the reader is gone: writing to a terminal or a pipe would fail
            self._turn_away()
        elif self.received == number:
            os._exit(128 + number)
        first, self.received = not self.received, number
        if first and is_main_process():
            with suppress(OSError):
                print("\nstopping after this step; once more to stop at once", file=sys.stderr, flush=True)

    @staticmethod
    def _turn_away() -> None:
        """Redirect further output to nowhere, unless it goes into a file."""
        for descriptor in (1, 2):
            with suppress(OSError):
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
