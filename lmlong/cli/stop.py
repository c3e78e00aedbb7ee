"""Signals to a command that reads without end: what was read is finished and saved."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from lmlong.io.signal_handlers import Handlers, signals_named


class Stop(Handlers):
    """SIGINT or SIGTERM: the first ends the wait for input, and the work after what was read; the second ends at once.

    Only the main thread receives signals, so in another thread none is noticed.
    """

    def __init__(self) -> None:
        super().__init__(signals_named("SIGINT", "SIGTERM"), self._receive)
        self.received: int | None = None
        self._waiting = False

    def until(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        """Iterate over pieces until a signal has come."""
        with suppress(InterruptedError):
            while self.received is None and (data := next(chunks, None)) is not None:
                yield data

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A wait, which a signal ends by InterruptedError, before it begins or while it lasts."""
        self._waiting = True
        try:
            if self.received is not None:
                raise InterruptedError
            yield
        finally:
            self._waiting = False

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = number
        if self._waiting:
            raise InterruptedError
