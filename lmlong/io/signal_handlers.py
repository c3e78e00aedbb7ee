"""Install signal handlers for a block of code, and restore the previous ones after it."""

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

HANGUP: int | None = getattr(signal, "SIGHUP", None)  # Windows has none


def signals_named(*names: str) -> tuple[int, ...]:
    """Return the signals with these names; skip names that this system lacks."""
    return tuple(getattr(signal, name) for name in names if hasattr(signal, name))


USER_DEFINED = signals_named("SIGUSR1", "SIGUSR2")

BY_A_PERSON = signals_named("SIGINT", "SIGTERM", "SIGQUIT")
"""Signals that end training at once when sent a third time."""

STOPPING = (*BY_A_PERSON, *signals_named("SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU"))
"""Signals that stop training. The kernel repeats SIGXCPU each second, and a terminal may repeat SIGHUP."""


class Handlers:
    """Handle signals with a function within a `with` block.

    Only the main thread receives signals, so this does nothing in another thread. SIGHUP stays ignored if it is, as
    under nohup. A program's own handlers of SIGUSR1 and SIGUSR2 stay.
    """

    def __init__(self, numbers: Iterable[int], receive: Callable[[int, FrameType | None], None]) -> None:
        self.numbers, self.receive = tuple(numbers), receive
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Handlers":
        if threading.current_thread() is threading.main_thread():
            handlers = {number: signal.getsignal(number) for number in self.numbers}
            self._before = {number: handler for number, handler in handlers.items() if _is_free(number, handler)}
        self.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def install(self) -> None:
        """Set the handlers; call it again if other code has replaced them within the block."""
        for number in self._before:
            signal.signal(number, self.receive)


NOTHING_SAVED = "stopped before the first step; nothing was saved"


@contextmanager
def interrupt_says(message: str) -> Iterator[None]:
    """Give a KeyboardInterrupt within the block a message, which the command line prints."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(message) from None


def _is_free(number: int, handler: Any) -> bool:
    """Return whether a handler may be replaced."""
    if handler is None:  # not set by Python, so it could not be put back
        return False
    is_ignored = number == HANGUP and handler == signal.SIG_IGN
    is_taken = number in USER_DEFINED and handler != signal.SIG_DFL
    return not is_ignored and not is_taken
