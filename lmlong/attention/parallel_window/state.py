"""The state of a recurrence with a parallel window."""

from typing import Any, NamedTuple

from lmlong.attention.window.state import WindowState


class ParallelState(NamedTuple):
    recurrence: Any
    window: WindowState
