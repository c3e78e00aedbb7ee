"""The decode step of a language model by native code, on a CPU."""

import ctypes
from array import array
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from lmlong.attention.feature_maps import ELU_FLOOR, RMS_EPS, Cosine, Relu, Softmax
from lmlong.attention.inputs import MIN_LOG_DECAY
from lmlong.attention.ngram.native.kernel import INTEGERS
from lmlong.attention.registry import native_kinds
from lmlong.model.block import BlockState
from lmlong.model.hourglass import BlockPhase
from lmlong.model.language_model import ModelState
from lmlong.native.decode import step
from lmlong.native.decode.kind import DecodeKind, native
from lmlong.native.decode.pack import PackedModel
from lmlong.native.decode.step import States
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
"""The kind of each layer's attention."""


@cache
def library() -> ctypes.CDLL | None:
    """Return the compiled step; None if it cannot be compiled."""
    return step.load(native_kinds().values(), CONSTANTS)


class NativeStep:
    """`LanguageModel.decode_step` of a model whose weights are final."""

    def __init__(self, functions: ctypes.CDLL, packed: PackedModel, downsampled_layers: range):
        self._functions, self._packed, self._downsampled = functions, packed, downsampled_layers
        self._threads, self._threads_of_steps = ThreadChoice(), ThreadChoice()
        self.kinds: Kinds = packed.kinds
        self.grows = any(kind.grows for kind in self.kinds)

    def __call__(self, token: Tensor, state: ModelState, phase: BlockPhase | None) -> tuple[Tensor, Tensor, ModelState]:
        token, state, kinds = token.long().contiguous(), as_native(self.kinds, state), self.kinds
        assert token.device.type == "cpu" and token.shape == state.position.shape
        blocks = tuple(
            empty_after(kind, block, phase if layer in self._downsampled else None)
            for layer, (kind, block) in enumerate(zip(kinds, state.blocks, strict=True))
        )
        hourglass, past = map_state(torch.empty_like, state.hourglass), map_state(torch.empty_like, state.last_tokens)
        after = ModelState(blocks, state.position + 1, hourglass, past)
        read, written = (
            States(layer_states(kinds, each.blocks), each.hourglass, each.last_tokens) for each in (state, after)
        )
        logits, hidden, full = self.run(token, state.position, read, written)
        if full or self.grows:
            after = after._replace(blocks=with_room(kinds, blocks, full))
        return logits, hidden, after

    def steps(self, tokens: Sequence[int], state: ModelState) -> list[tuple[Tensor, Tensor, ModelState]]:
        """Return what a step at each of the next tokens of one text returns, to the bit, in one pass over the weights.
        The pass may end early, before a token for which a state has no room."""
        assert state.hourglass is None and len(state.position) == 1
        kinds, state = self.kinds, as_native(self.kinds, state)
        blocks = [state.blocks]
        for _ in tokens:
            blocks.append(tuple(empty_after(kind, block, None) for kind, block in zip(kinds, blocks[-1], strict=True)))
        layers = [layer_states(kinds, each) for each in blocks]
        read, positions = torch.tensor(tokens), state.position + torch.arange(len(tokens) + 1)
        past = before = after = None
        if state.last_tokens is not None:
            past = torch.cat([state.last_tokens[0], read]).unfold(0, state.last_tokens.shape[1], 1)
            before = past[:-1].contiguous()
            after = torch.empty_like(before)
        logits, hidden, full = self._run(
            self._threads_of_steps,
            (read, positions, States(joined(layers[:-1]), None, before), States(joined(layers[1:]), None, after)),
            consecutive=True,
        )
        outputs = []
        for index, written in enumerate(blocks[1:]):
            kept = with_room(kinds, written, full) if full or self.grows else written
            one, last = slice(index, index + 1), None if after is None else after[index : index + 1].clone()
            outputs.append((logits[one], hidden[one], ModelState(kept, positions[one] + 1, None, last)))
            if any(new.attention is not old.attention for new, old in zip(kept, written, strict=True)):
                break
        return outputs

    def run(
        self, tokens: Tensor, positions: Tensor, before: States, after: States, separate: bool = False
    ) -> tuple[Tensor, Tensor, bool]:
        """Step rows from the states `before` to the states `after`, with the fastest number of threads
        (`step.decode`)."""
        return self._run(self._threads, (tokens, positions, before, after), separate)

    def _run(
        self,
        threads: ThreadChoice,
        inputs: tuple[Tensor, Tensor, States, States],
        separate: bool = True,
        consecutive: bool = False,
    ) -> tuple[Tensor, Tensor, bool]:
        return threads.run(
            lambda workers: step.decode(self._functions, self._packed, *inputs, workers, separate, consecutive),
            torch.get_num_threads(),
        )


def as_native(kinds: Kinds, state: ModelState) -> ModelState:
    """Return the state in the dtypes that native code reads, with contiguous tensors."""
    blocks = tuple(
        BlockState(kind.as_native(attention), None if tail is None else native(tail))
        for kind, (attention, tail) in zip(kinds, state.blocks, strict=True)
    )
    hourglass, last_tokens = map_state(native, state.hourglass), map_state(native, state.last_tokens)
    return ModelState(blocks, native(state.position), hourglass, last_tokens)


def empty_after(kind: DecodeKind[Any], before: BlockState, phase: BlockPhase | None) -> BlockState:
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


def layer_states(kinds: Kinds, blocks: Iterable[BlockState]) -> array:
    """Return the states of layers as native code reads them: for each, a `LayerState` and the attention's state."""
    return array("q", chain.from_iterable(map(_fields, kinds, blocks)))


def joined(states: Sequence[array]) -> array:
    """Return the states of layers of several rows, one row after another."""
    return array("q", b"".join(map(array.tobytes, states)))


def _fields(kind: DecodeKind[Any], block: BlockState) -> Sequence[int]:
    attention, tail = block
    return 0 if tail is None else tail.data_ptr(), *kind.fields(attention)
