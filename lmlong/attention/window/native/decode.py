"""Window attention in the native decode step."""

import ctypes
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from lmlong.attention.window.state import WindowState
from lmlong.native.decode.kind import DecodeKind, Packer
from lmlong.native.decode.structures import ints, pointers, structure


class WindowDecode(DecodeKind[WindowState]):
    name = "WindowAttention"
    header = Path(__file__).with_suffix(".h")
    weights = structure("WindowAttention::Weights", *ints("window"))
    state = structure("WindowAttention::State", *pointers(*WindowState._fields))

    def pack(self, packer: Packer, attention: Any, gates: Mapping[str, nn.Module]) -> ctypes.Structure:
        return self.weights(packer.open(attention, "window").options["window"])


DECODE = WindowDecode()
