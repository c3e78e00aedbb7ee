"""Signals during training: a request to stop, which finishes and saves the step.

Ctrl-C, a closed terminal, and the signals of cluster schedulers before a time limit all mean the same. The third
Ctrl-C, SIGTERM or SIGQUIT ends training at once, without a checkpoint; the second only reports the current work.
"""

import os
import stat
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from lightning.pytorch import Callback, LightningModule, Trainer

from lmlong.io.signal_handlers import BY_A_PERSON, HANGUP, STOPPING, Handlers
from lmlong.training.distributed import all_reduce_max, is_main_process


class StopAtOnce(BaseException):
    """The same signal was received three times. It is not a KeyboardInterrupt, for which Lightning ends the process and
    ignores Ctrl-C."""

    def __init__(self, signal_number: int):
        super().__init__(signal_number)
        self.signal_number = signal_number


class StopOnSignal(Callback, Handlers):
    """A callback that stops all ranks together at the end of a step, after a signal received within its `with` block.

    Only the main thread receives signals, so in another thread no signal stops a run.
    """

    def __init__(self, processes: int = 1) -> None:
        super().__init__(STOPPING, self._receive)
        self.processes = processes
        self.received = 0  # the first signal that this process received
        self.agreed: int | None = None  # the signal that all ranks stop for
        self._counts: Counter[int] = Counter()
        self._is_saving = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.install()  # Lightning has replaced some of them

    def agree(self, trainer: Trainer) -> bool:
        """Return, on all ranks, whether any rank received a signal; all ranks call this together.

        A signal during the exchange is not lost: it counts in the next exchange.
        """
        self.agreed = all_reduce_max(trainer, self.received) or None
        return self.agreed is not None

    @contextmanager
    def saving(self) -> Iterator[None]:
        """A block in which a checkpoint is being saved, as a second signal then reports."""
        self._is_saving = True
        try:
            yield
        finally:
            self._is_saving = False

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._counts[number] += 1
        if number == HANGUP:  # the terminal or pipe is closed: writing to it would fail
            self._discard_output()
        if number in BY_A_PERSON and self._counts[number] > 2:
            if self.processes > 1:  # an orderly exit would wait for the other ranks
                os._exit(128 + number)
            raise StopAtOnce(number)
        is_first, self.received = not self.received, self.received or number
        if is_first:
            self._print("stopping: finishing and saving this step first")
        elif number in BY_A_PERSON and self._counts[number] == 2:
            doing = "the checkpoint is being saved" if self._is_saving else "this step is being finished and saved"
            self._print(f"{doing}; once more to stop at once, without it")

    @staticmethod
    def _print(line: str) -> None:
        """Print a line to stderr, unless the signal interrupted another write to it."""
        if is_main_process():
            with suppress(OSError, RuntimeError):
                print(f"\n{line}", file=sys.stderr, flush=True)

    @staticmethod
    def _discard_output() -> None:
        """Discard further output, unless it goes to a file."""
        for descriptor in (1, 2):
            with suppress(OSError):
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
