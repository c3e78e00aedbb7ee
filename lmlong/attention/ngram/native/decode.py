"""n-gram attention in the native decode step."""

import ctypes
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from lmlong.attention.ngram.hashing import NO_NGRAM
from lmlong.attention.ngram.native.kernel import INTEGERS
from lmlong.attention.ngram.state import RECENT, WAITING, NgramState
from lmlong.attention.ngram.step import make_room
from lmlong.native.decode.kind import DecodeKind, Packer
from lmlong.native.decode.structures import Gate, ints, pointers, structure
from lmlong.recipe import MAX_NGRAM


class NgramDecode(DecodeKind[NgramState]):
    name = "NgramAttention"
    header = Path(__file__).with_suffix(".h")
    weights = structure(
        "NgramAttention::Weights",
        *ints("rows"),
        *pointers("sizes"),
        ("read_gate", Gate),
        *pointers("number_weight", "raw_smoothing"),
    )
    state = structure("NgramAttention::State", *pointers(*NgramState._fields))
    constants = MappingProxyType({**INTEGERS, "RECENT": RECENT, "WAITING": WAITING, "MAX_NGRAM": MAX_NGRAM})

    def pack(self, packer: Packer, attention: Any, gates: Mapping[str, nn.Module]) -> ctypes.Structure:
        spec = packer.open(attention, "ngram")
        sizes = packer.address(torch.tensor(spec.options["sizes"]))
        gate = packer.gate(gates["read_gate"], "identity", attention.heads)
        weights = (packer.floats(attention, spec.weights[name]) for name in ("number_weight", "raw_smoothing"))
        return self.weights(spec.options["rows"], sizes, gate, *weights)

    def each_written(self, change: Callable[[Tensor], Tensor], state: NgramState) -> NgramState:
        """Change only the recent values: a step writes neither to the table nor to the waiting values."""
        return NgramState(*state[:5], *map(change, state[5:]))

    def with_room(self, state: NgramState, full: bool) -> NgramState:
        return make_room(state) if full and bool((state.recent_ngram[..., 0] != NO_NGRAM).any()) else state


DECODE = NgramDecode()
