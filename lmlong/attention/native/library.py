"""What scan.cpp is asked for, and its functions."""

import ctypes
from functools import cache
from pathlib import Path

from lmlong.attention.chunks import FAINTEST
from lmlong.attention.features import ELU_FLOOR, Relu
from lmlong.attention.spans import SMALLEST
from lmlong.native.library import compiled, run

CODE = Path(__file__).parent
CONSTANTS = {"SMALLEST": SMALLEST, "FAINTEST": FAINTEST, "ELU_FLOOR": ELU_FLOOR, "RELU_FLOOR": Relu.FLOOR}


class Rows(ctypes.Structure):
    """A tensor of scan.cpp, by where it lies."""

    _fields_ = (("at", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("row", "head", "token", "halves")))


class Job(ctypes.Structure):
    """What scan.cpp is asked for; its fields are explained there."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("lines", "heads", "time", "features", "values", "map")),
        *((name, Rows) for name in ("q", "k", "v", "starts", "log_decay", "y", "denominators")),
        *((name, Rows) for name in ("dy", "dq", "dk", "dv", "dlog_decay")),
        *((name, ctypes.c_void_p) for name in ("before", "after", "dbefore", "dafter", "scratch")),
        *((name, ctypes.c_int64) for name in ("scratch_size", "worker", "line")),
    )


class Library:
    """The compiled scan."""

    def __init__(self, functions: ctypes.CDLL):
        self._functions = functions
        self.scratch_size = functions.scratch_size
        self.scratch_size.argtypes = [ctypes.c_int64] * 3
        self.scratch_size.restype = ctypes.c_int64

    def run(self, name: str, job: Job, workers: int) -> None:
        """Share the lines of a job out among so many threads."""
        run(self._functions[name], job, workers)


@cache
def library() -> Library | None:
    """The library, compiled at its first use on a machine; None where that cannot be."""
    functions = compiled(CODE, CONSTANTS, "linear attention is computed by torch, slower")
    return Library(functions) if functions else None
