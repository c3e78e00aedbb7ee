"""The decode step of a language model by native code, on a CPU."""

import ctypes
from array import array
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lmlong.attention.feature_maps import ELU_FLOOR, RMS_EPS, Cosine, Relu, Softmax
from lmlong.attention.inputs import MIN_LOG_DECAY
from lmlong.attention.registry import NATIVE_DECODE
from lmlong.model.block import BlockState
from lmlong.model.hourglass import BlockPhase, HourglassState
from lmlong.model.language_model import ModelState
from lmlong.native.decode import step
from lmlong.native.decode.kind import DecodeKind, floats, integers
from lmlong.native.decode.pack import PackedModel
from lmlong.native.decode.step import HourglassTensors, States
from lmlong.native.threads import ThreadChoice

CONSTANTS = {
    "ELU_FLOOR": ELU_FLOOR,
    "RELU_FLOOR": Relu.FLOOR,
    "COSINE_SHRINK": Cosine.SHRINK,
    "COSINE_TINY": Cosine.TINY,
    "SOFTMAX_FLOOR": Softmax.FLOOR,
    "MIN_LOG_DECAY": MIN_LOG_DECAY,
    "RMS_EPS": RMS_EPS,
}
"""Of feature maps and gates, which several kinds of attention have."""

Kinds = Sequence[DecodeKind[Any]]
"""The kind of each layer's attention."""


@cache
def library() -> ctypes.CDLL | None:
    """Return the compiled step; None where it cannot be compiled."""
    return step.load(list(NATIVE_DECODE.values()), CONSTANTS)


class NativeStep:
    """`LanguageModel.decode_step` of a model whose weights are final."""

    def __init__(self, functions: ctypes.CDLL, packed: PackedModel, downsampled_layers: range):
        self._functions, self._packed, self._downsampled = functions, packed, downsampled_layers
        self._threads = ThreadChoice()

    @property
    def kinds(self) -> Kinds:
        return self._packed.kinds

    def __call__(self, token: Tensor, state: ModelState, phase: BlockPhase | None) -> tuple[Tensor, ModelState]:
        token, state, kinds = token.long().contiguous(), as_native(self.kinds, state), self.kinds
        assert token.device.type == "cpu" and token.shape == state.position.shape
        blocks = tuple(
            empty_after(kind, block, phase if layer in self._downsampled else None)
            for layer, (kind, block) in enumerate(zip(kinds, state.blocks, strict=True))
        )
        hourglass = None if state.hourglass is None else HourglassState(*map(torch.empty_like, state.hourglass))
        past = None if state.last_tokens is None else torch.empty_like(state.last_tokens)
        after = ModelState(blocks, state.position + 1, hourglass, past)
        logits, full = self.run(token, state.position, self._tensors(state), self._tensors(after))
        blocks = tuple(with_room(kind, block, full) for kind, block in zip(kinds, after.blocks, strict=True))
        return logits, after._replace(blocks=blocks)

    def run(
        self, tokens: Tensor, positions: Tensor, before: States, after: States, separate: bool = False
    ) -> tuple[Tensor, bool]:
        """Step rows whose states lie `before` and `after`, by as many threads as are fastest (`step.decode`)."""
        inputs = (self._functions, self._packed, tokens, positions, before, after)
        return self._threads.run(lambda workers: step.decode(*inputs, workers, separate), torch.get_num_threads())

    def _tensors(self, state: ModelState) -> States:
        hourglass = None if state.hourglass is None else HourglassTensors(*state.hourglass)
        return States(layer_states(self.kinds, state.blocks), hourglass, state.last_tokens)


def as_native(kinds: Kinds, state: ModelState) -> ModelState:
    """Return the state in the dtypes that native code reads, each tensor contiguous."""
    hourglass = state.hourglass and HourglassState(*map(floats, state.hourglass))
    past = None if state.last_tokens is None else integers(state.last_tokens)
    blocks = tuple(
        BlockState(kind.as_native(attention), None if tail is None else floats(tail))
        for kind, (attention, tail) in zip(kinds, state.blocks, strict=True)
    )
    return ModelState(blocks, integers(state.position), hourglass, past)


def empty_after(kind: DecodeKind[Any], before: BlockState, phase: BlockPhase | None) -> BlockState:
    """Return tensors for the state of a layer after a token. A layer that reads whole blocks may have none to read, or
    not in each row."""
    if phase is not None and not phase.blocks:
        return before
    attention, tail = before
    new = torch.empty_like if phase is None else torch.clone
    return BlockState(kind.empty_after(attention, phase is not None), None if tail is None else new(tail))


def with_room(kind: DecodeKind[Any], block: BlockState, full: bool) -> BlockState:
    """Return a layer's state with room for what the next token adds to it."""
    attention, tail = block
    return BlockState(kind.with_room(attention, full), tail)


def layer_states(kinds: Kinds, blocks: Iterable[BlockState]) -> array:
    """Return the states of layers as native code reads them: each a `LayerState` and the state of its attention."""
    return step.layer_states(map(_fields, kinds, blocks))


def _fields(kind: DecodeKind[Any], block: BlockState) -> Sequence[int]:
    attention, tail = block
    return 0 if tail is None else tail.data_ptr(), *kind.fields(attention)
