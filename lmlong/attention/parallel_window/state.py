"""The state of a recurrence with a window beside it."""

from typing import Any, NamedTuple

from lmlong.attention.window.state import WindowState


class ParallelState(NamedTuple):
    recurrence: Any
    window: WindowState
