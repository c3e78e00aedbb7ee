"""The decode step of a language model by native code, on a CPU."""

import ctypes
from functools import cache

import torch
from torch import Tensor

from lmlong.attention.feature_maps import ELU_FLOOR, Cosine, Relu, Softmax
from lmlong.attention.inputs import MIN_LOG_DECAY
from lmlong.attention.linear.autograd import MIN_DENOMINATOR
from lmlong.attention.linear.naive import LinearState
from lmlong.model.block import BlockState
from lmlong.model.hourglass import BlockPhase, HourglassState
from lmlong.model.language_model import ModelState
from lmlong.model.layers import RMS_EPS
from lmlong.model.rope import ROPE_BASE
from lmlong.native.decode import step
from lmlong.native.decode.pack import PackedModel
from lmlong.native.decode.step import HourglassTensors, LayerTensors, States
from lmlong.native.threads import ThreadChoice

CONSTANTS = {
    "MIN_DENOMINATOR": MIN_DENOMINATOR,
    "ELU_FLOOR": ELU_FLOOR,
    "RELU_FLOOR": Relu.FLOOR,
    "COSINE_SHRINK": Cosine.SHRINK,
    "COSINE_TINY": Cosine.TINY,
    "SOFTMAX_FLOOR": Softmax.FLOOR,
    "MIN_LOG_DECAY": MIN_LOG_DECAY,
    "RMS_EPS": RMS_EPS,
    "ROPE_BASE": ROPE_BASE,
}


@cache
def library() -> ctypes.CDLL | None:
    """Return the compiled step; None where it cannot be compiled."""
    return step.load(CONSTANTS)


class NativeStep:
    """`LanguageModel.decode_step` of a model whose weights are final."""

    def __init__(self, functions: ctypes.CDLL, packed: PackedModel, downsampled_layers: range):
        self._functions, self._packed, self._downsampled = functions, packed, downsampled_layers
        self._threads = ThreadChoice()

    def __call__(self, token: Tensor, state: ModelState, phase: BlockPhase | None) -> tuple[Tensor, ModelState]:
        token, state = token.long().contiguous(), _as_packed(state)
        assert token.device.type == "cpu" and token.shape == state.position.shape
        blocks = tuple(
            _empty_after(block, phase if layer in self._downsampled else None)
            for layer, block in enumerate(state.blocks)
        )
        hourglass = None if state.hourglass is None else HourglassState(*map(torch.empty_like, state.hourglass))
        after = ModelState(blocks, state.position + 1, hourglass)
        inputs = (token, state.position, _tensors(state), _tensors(after))
        logits = self._threads.run(
            lambda workers: step.decode(self._functions, self._packed, *inputs, workers), torch.get_num_threads()
        )
        return logits, after


def _as_packed(state: ModelState) -> ModelState:
    """Return the state in the dtypes of job.h, each tensor contiguous."""
    hourglass = state.hourglass and HourglassState(*map(_floats, state.hourglass))
    return ModelState(tuple(map(_block_as_packed, state.blocks)), state.position.long().contiguous(), hourglass)


def _block_as_packed(block: BlockState) -> BlockState:
    attention, tail = block.attention, None if block.tail is None else _floats(block.tail)
    if isinstance(attention, LinearState) and attention.S.dtype == torch.float64:
        return BlockState(LinearState(attention.S.contiguous(), attention.z.double().contiguous()), tail)
    parts = (x.contiguous() if x.dtype == torch.bool else _floats(x) for x in attention)
    return BlockState(type(attention)(*parts), tail)


def _floats(x: Tensor) -> Tensor:
    return x.float().contiguous()


def _empty_after(before: BlockState, phase: BlockPhase | None) -> BlockState:
    """Return empty tensors for the state of a layer after a token. A layer that reads whole blocks may have none to
    read, or not in each row."""
    if phase is not None and not phase.blocks:
        return before
    new = torch.empty_like if phase is None else torch.clone
    tail = None if before.tail is None else new(before.tail)
    return BlockState(type(before.attention)(*map(new, before.attention)), tail)


def _tensors(state: ModelState) -> States:
    layers = []
    for (first, second, *current), tail in state.blocks:
        layers.append(LayerTensors(first, second, current[0] if current else None, tail))
    return States(layers, None if state.hourglass is None else HourglassTensors(*state.hourglass))
