"""The end of a command that reads for ever, by a signal: what was read is finished and saved."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any


class Stop:
    """SIGINT or SIGTERM: the first ends the wait for input, and the work after what was read; the second all at once.

    Signals reach the main thread alone, so in another thread none is noted.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._waiting = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():
            numbers = (signal.SIGINT, signal.SIGTERM)
            self._before = {number: signal.signal(number, self._receive) for number in numbers}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

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
