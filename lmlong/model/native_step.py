"""The decode step of a language model by native code, on a CPU."""

import ctypes
from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from lmlong.attention.feature_maps import ELU_FLOOR, RMS_EPS, Cosine, Relu, Softmax
from lmlong.attention.inputs import MIN_LOG_DECAY
from lmlong.attention.ngram.native.kernel import INTEGERS
from lmlong.attention.registry import native_kinds
from lmlong.model.block import BlockState
from lmlong.model.language_model import ModelState
from lmlong.model.packed_model import PackedModel
from lmlong.model.stretch import BlockPhase
from lmlong.native.build import NativeLibrary
from lmlong.native.decode import step
from lmlong.native.decode.kind import DecodeKind, native
from lmlong.native.decode.step import Integers, States
from lmlong.native.source import NativeCode
from lmlong.native.state import map_state
from lmlong.native.threads import ThreadChoice
from lmlong.recipe import MAX_NGRAM

CONSTANTS = {
    "ELU_FLOOR": ELU_FLOOR,
    "RELU_FLOOR": Relu.FLOOR,
    "COSINE_SHRINK": Cosine.SHRINK,
    "COSINE_TINY": Cosine.TINY,
    "SOFTMAX_FLOOR": Softmax.FLOOR,
    "MIN_LOG_DECAY": MIN_LOG_DECAY,
    "RMS_EPS": RMS_EPS,
    **INTEGERS,
    "MAX_NGRAM": MAX_NGRAM,
}
"""Constants of feature maps, gates and n-grams, which several kinds of attention share."""

Kinds = Sequence[DecodeKind[Any]]
"""The kind of each mixer's attention."""


def code() -> NativeCode:
    return step.step_code(native_kinds().values(), CONSTANTS)


@cache
def library() -> NativeLibrary | None:
    """Return the native step, or None if native code is unavailable."""
    return step.load_step(code())


class NativeStep:
    """`LanguageModel.decode_step` of a model whose weights are final."""

    def __init__(self, functions: ctypes.CDLL, packed: PackedModel, downsampled_layers: range):
        self._functions, self._packed, self._downsampled = functions, packed, downsampled_layers
        self._threads, self._threads_of_passes = ThreadChoice(), ThreadChoice()
        self.kinds: Kinds = packed.kinds
        self.grows = any(kind.grows for kind in self.kinds)

    def __call__(self, token: Tensor, state: ModelState, phase: BlockPhase | None) -> tuple[Tensor, Tensor, ModelState]:
        token, before, state = token.long().contiguous(), NativeBlocks.of(self.kinds, state.blocks), as_native(state)
        assert token.device.type == "cpu" and token.shape == state.position.shape
        blocks = before.empty_after(dict.fromkeys(self._downsampled, phase))
        hourglass, past = map_state(torch.empty_like, state.hourglass), map_state(torch.empty_like, state.last_tokens)
        after = ModelState(blocks, state.position + 1, hourglass, past)
        read = States(before.fields, state.hourglass, state.last_tokens)
        written = States(blocks.fields, hourglass, past)
        logits, hidden, full = self._run(self._threads, (token, state.position, read, written), separate=False)
        if full or self.grows:
            after = after._replace(blocks=with_room(self.kinds, blocks, full))
        return logits, hidden, after

    def run(
        self, tokens: array, positions: array, before: States, after: States, consecutive: bool = False
    ) -> tuple[Tensor, Tensor, bool]:
        """Step rows, each with its own state, or the `consecutive` tokens of one text, with the fastest number of
        threads (`step.decode`)."""
        threads = self._threads_of_passes if consecutive and len(tokens) > 1 else self._threads
        return self._run(threads, (tokens, positions, before, after), True, consecutive)

    def _run(
        self,
        threads: ThreadChoice,
        inputs: tuple[Integers, Integers, States, States],
        separate: bool,
        consecutive: bool = False,
    ) -> tuple[Tensor, Tensor, bool]:
        return threads.run(
            lambda workers: step.decode(self._functions, self._packed.model, *inputs, workers, separate, consecutive),
            torch.get_num_threads(),
        )


class NativeBlocks(tuple[BlockState, ...]):
    """The states of layers in the dtypes of native code, with their addresses, which are read only once. Each token
    has new states."""

    kinds: Kinds
    fields: array
    """For each layer, its `LayerState` and the state of its attention."""
    origin: object
    """Identifies the tensors that steps do not write to."""

    @classmethod
    def of(cls, kinds: Kinds, blocks: tuple[BlockState, ...]) -> "NativeBlocks":
        """Return the states in the dtypes that native code reads, with contiguous tensors."""
        if isinstance(blocks, NativeBlocks) and blocks.kinds is kinds:
            return blocks
        return cls._of_native(
            kinds,
            [
                BlockState(kind.as_native(attention), None if tail is None else native(tail))
                for kind, (attention, tail) in zip(kinds, blocks, strict=True)
            ],
        )

    @classmethod
    def _of_native(cls, kinds: Kinds, blocks: list[BlockState], origin: object | None = None) -> "NativeBlocks":
        self = cls(blocks)
        self.kinds, self.fields, self.origin = kinds, array("q"), origin or object()
        for kind, (attention, tail) in zip(kinds, blocks, strict=True):
            self.fields.append(0 if tail is None else tail.data_ptr())
            self.fields.extend(kind.fields(attention))
        return self

    def empty_after(self, phases: Mapping[int, BlockPhase | None] = MappingProxyType({})) -> "NativeBlocks":
        """Return tensors for the states after a token; `phases`: of downsampled layers, by their indices."""
        return self._of_native(
            self.kinds,
            [
                _empty_after(kind, block, phases.get(layer))
                for layer, (kind, block) in enumerate(zip(self.kinds, self, strict=True))
            ],
            self.origin,
        )

    def __reduce__(self) -> Any:
        return tuple, (tuple(self),)  # copies have other addresses


def as_native(state: ModelState) -> ModelState:
    """Return the state with contiguous tensors outside layers, in the dtypes that native code reads."""
    hourglass, last_tokens = map_state(native, state.hourglass), map_state(native, state.last_tokens)
    return state._replace(position=native(state.position), hourglass=hourglass, last_tokens=last_tokens)


def _empty_after(kind: DecodeKind[Any], before: BlockState, phase: BlockPhase | None) -> BlockState:
    """Return tensors for the state of a layer after a token. A downsampled layer may have no block to read, in some
    rows or in all."""
    if phase is not None and not phase.blocks:
        return before
    new = torch.empty_like if phase is None else torch.clone
    attention, tail = before
    return BlockState(kind.empty_after(attention, phase is not None), None if tail is None else new(tail))


def with_room(kinds: Kinds, blocks: Sequence[BlockState], full: bool) -> tuple[BlockState, ...]:
    """Return the states of layers with room for the next token; `full`: some may have no room left."""
    return tuple(
        BlockState(kind.with_room(attention, full), tail) for kind, (attention, tail) in zip(kinds, blocks, strict=True)
    )


def joined(states: Iterable[NativeBlocks]) -> array:
    """Return the addresses of the states of several rows, one row after another."""
    return array("q", b"".join(state.fields.tobytes() for state in states))
