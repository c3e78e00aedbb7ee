"""Layers that mix tokens only by the short convolution of their values, which every mixer has.

B batch, H heads, T time, V value dim.
"""

import ctypes
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lmlong.attention.base import CausalAttention
from lmlong.attention.inputs import NOTHING, Inputs
from lmlong.native.decode.kind import DecodeKind
from lmlong.native.decode.packer import Packer
from lmlong.native.decode.structures import structure


class NoState(NamedTuple):
    """Nothing: the last inputs of the convolution are in the state of the mixer."""


class ConvolutionEffect(NamedTuple):
    """Nothing."""


class ConvolutionDecode(DecodeKind[NoState]):
    name = "ConvolutionMixer"
    header = Path(__file__).with_name("decode.h")
    weights = structure("ConvolutionMixer::Weights")
    state = structure("ConvolutionMixer::State")

    def pack(self, packer: Packer, attention: Any, gates: Mapping[str, nn.Module]) -> ctypes.Structure:
        packer.known(attention, ConvolutionMixer)
        return self.weights()


class ConvolutionMixer(CausalAttention[NoState]):
    """y_t = v_t. The mixer convolves v before, and gates it before and after."""

    has_keys = False
    normalizes_heads = False
    native_decode = ConvolutionDecode()

    def __init__(self, heads: int, head_dim: int, value_dim: int):
        super().__init__()
        self.heads, self.head_dim, self.value_dim = heads, head_dim, value_dim

    def init_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> NoState:
        return NoState()

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: NoState,
        document_starts: Tensor | None = None,
        inputs: Inputs = NOTHING,
    ) -> tuple[Tensor, NoState]:
        return v, state

    def reference(
        self, q: Tensor, k: Tensor, v: Tensor, document_starts: Tensor | None = None, inputs: Inputs = NOTHING
    ) -> Tensor:
        return v

    def effect(
        self, k: Tensor, v: Tensor, document_starts: Tensor | None = None, inputs: Inputs = NOTHING
    ) -> ConvolutionEffect:
        return ConvolutionEffect()

    def after_effect(self, state: NoState, effect: ConvolutionEffect) -> NoState:
        return state
