"""The code length of a text by context mixing, after training text: the strongest baseline that takes seconds.

native/context_mixing.cpp explains the model. Like a compressor, it reads the text as one row, so it uses what it
learned from earlier documents.
"""

import ctypes
from functools import cache
from pathlib import Path

import numpy as np

from lmlong.native.build import NativeLibrary, load
from lmlong.native.source import NativeCode, Shared

CODE = Path(__file__).parent / "native"

MIXED = 1 << 20
"""The weights are learned on this many last bytes of the training text. The bytes before are only read."""

SMALLEST_TABLE, LARGEST_TABLE = 16, 23
"""Binary logarithms of the slots, of 16 bytes each: up to 128 MiB."""


def code() -> NativeCode:
    return NativeCode(CODE, Shared({}, [], []))


@cache
def library() -> NativeLibrary | None:
    """Return the library, or None if native code is unavailable."""
    return load(code(), "the strongest baseline is lzma")


def code_lengths(primer: bytes, text: bytes, mixed: int = MIXED) -> np.ndarray | None:
    """Return the bits that each byte of a text takes, given a primer and the bytes before it. None if there is
    no native code for this machine."""
    if (functions := library()) is None:
        return None
    data = np.frombuffer(primer + text, np.uint8)
    bits = np.zeros(len(text), np.float32)
    table = min(max(len(data).bit_length() - 1, SMALLEST_TABLE), LARGEST_TABLE)
    numbers = map(ctypes.c_int64, (len(primer), len(data), table, mixed))
    functions.code_lengths(ctypes.c_void_p(data.ctypes.data), *numbers, ctypes.c_void_p(bits.ctypes.data))
    return bits
