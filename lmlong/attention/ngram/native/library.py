"""The compiled scan.cpp: its structure and its functions."""

import ctypes
from functools import cache
from pathlib import Path

from lmlong.attention.ngram.hashing import BITS, GOLDEN, MULTIPLIER, NO_NGRAM
from lmlong.native.build import Shared, compiled

CODE = Path(__file__).parent
INTEGERS = {"HASH_BITS": BITS, "HASH_MULTIPLIER": MULTIPLIER, "HASH_GOLDEN": GOLDEN, "NO_NGRAM": NO_NGRAM}


class NgramJob(ctypes.Structure):
    """The arguments of a scan; its fields are explained in scan.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("lines", "heads", "time", "value_dim", "rows")),
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("hashes", "document_starts", "v", "sums", "numbers", "cleared"),
                *("S_before", "number_before", "ngram_before", "S_after", "number_after", "ngram_after"),
                *("dsums", "dv", "dS"),
            )
        ),
        *((name, ctypes.c_int64) for name in ("lines_begun", "invalid")),
    )


@cache
def library() -> ctypes.CDLL | None:
    """Return the library, compiled at its first use on a machine; None where it cannot be."""
    shared = Shared({}, [], [NgramJob], INTEGERS)
    return compiled(CODE, shared, "n-gram attention is computed by torch, slower")
