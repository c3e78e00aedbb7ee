"""The compiled scan.cpp: its structures and its functions."""

import ctypes
from functools import cache
from pathlib import Path

from lmlong.attention.feature_maps import ELU_FLOOR, Relu
from lmlong.attention.linear.autograd import MIN_DENOMINATOR
from lmlong.attention.linear.chunk import MIN_LOG2_DECAY
from lmlong.native.build import Shared, compiled
from lmlong.native.feature_maps import FeatureMap
from lmlong.native.threads import run_on_threads

CODE = Path(__file__).parent
CONSTANTS = {
    "MIN_DENOMINATOR": MIN_DENOMINATOR,
    "MIN_LOG2_DECAY": MIN_LOG2_DECAY,
    "ELU_FLOOR": ELU_FLOOR,
    "RELU_FLOOR": Relu.FLOOR,
}


class StridedTensor(ctypes.Structure):
    """A tensor by its address and strides; its fields are explained in job.h."""

    _fields_ = (("data", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("row", "head", "token", "bfloat16")))


class ScanJob(ctypes.Structure):
    """The arguments of a scan; its fields are explained in job.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("lines", "heads", "time", "features", "value_dim", "feature_map")),
        *((name, StridedTensor) for name in ("q", "k", "v", "document_starts", "log_decay", "y", "denominators")),
        *((name, StridedTensor) for name in ("dy", "dq", "dk", "dv", "dlog_decay")),
        *(
            (name, ctypes.c_void_p)
            for name in ("state_before", "state_after", "dstate_before", "dstate_after", "scratch")
        ),
        *((name, ctypes.c_int64) for name in ("scratch_size", "workers_begun", "lines_begun")),
    )


class Library:
    """The compiled scan's functions."""

    def __init__(self, functions: ctypes.CDLL):
        self._functions = functions
        self.scratch_size = functions.scratch_size
        self.scratch_size.argtypes = [ctypes.c_int64] * 3
        self.scratch_size.restype = ctypes.c_int64

    def run(self, name: str, job: ScanJob, workers: int) -> None:
        """Run a job, its heads and rows divided among `workers` threads."""
        run_on_threads(self._functions[name], job, workers)


@cache
def library() -> Library | None:
    """Return the library, compiled at its first use on a machine; None where it cannot be."""
    shared = Shared(CONSTANTS, [FeatureMap], [StridedTensor, ScanJob])
    functions = compiled(CODE, shared, "linear attention is computed by torch, slower")
    return Library(functions) if functions else None
