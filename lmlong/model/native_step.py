"""The decode step of a language model by native code, on a CPU."""

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from lmlong.attention.base import state_tensors
from lmlong.attention.delta.features import TINY
from lmlong.attention.delta.naive import DeltaState
from lmlong.attention.feature_maps import ELU_FLOOR, RMS_EPS, Cosine, Relu, Softmax
from lmlong.attention.inputs import MIN_LOG_DECAY
from lmlong.attention.linear.autograd import MIN_DENOMINATOR
from lmlong.attention.linear.naive import LinearState
from lmlong.attention.ngram.native.library import INTEGERS as HASHING
from lmlong.attention.ngram.state import RECENT, WAITING, NgramState
from lmlong.attention.ngram.step import make_room
from lmlong.attention.parallel_window import ParallelState
from lmlong.attention.softmax import KeyValues, KVCache
from lmlong.attention.softmax import with_room as cache_with_room
from lmlong.attention.window import WindowState
from lmlong.model.block import BlockState
from lmlong.model.hourglass import BlockPhase, HourglassState
from lmlong.model.language_model import ModelState
from lmlong.model.state import rebuild_state
from lmlong.native.decode import step
from lmlong.native.decode.pack import PackedModel
from lmlong.native.decode.step import HourglassTensors, States
from lmlong.native.threads import ThreadChoice
from lmlong.recipe import MAX_NGRAM

CONSTANTS = {
    "MIN_DENOMINATOR": MIN_DENOMINATOR,
    "ELU_FLOOR": ELU_FLOOR,
    "RELU_FLOOR": Relu.FLOOR,
    "COSINE_SHRINK": Cosine.SHRINK,
    "COSINE_TINY": Cosine.TINY,
    "SOFTMAX_FLOOR": Softmax.FLOOR,
    "UNIT_TINY": TINY,
    "MIN_LOG_DECAY": MIN_LOG_DECAY,
    "RMS_EPS": RMS_EPS,
}
INTEGERS = {**HASHING, "RECENT": RECENT, "WAITING": WAITING, "MAX_NGRAM": MAX_NGRAM}

NOTHING = (0,) * 15
"""The fields of a `LayerState` that other attentions have."""


@cache
def library() -> ctypes.CDLL | None:
    """Return the compiled step; None where it cannot be compiled."""
    return step.load(CONSTANTS, INTEGERS)


class NativeStep:
    """`LanguageModel.decode_step` of a model whose weights are final."""

    def __init__(self, functions: ctypes.CDLL, packed: PackedModel, downsampled_layers: range):
        self._functions, self._packed, self._downsampled = functions, packed, downsampled_layers
        self._threads = ThreadChoice()

    def __call__(self, token: Tensor, state: ModelState, phase: BlockPhase | None) -> tuple[Tensor, ModelState]:
        token, state = token.long().contiguous(), as_packed(state)
        assert token.device.type == "cpu" and token.shape == state.position.shape
        blocks = tuple(
            empty_after(block, phase if layer in self._downsampled else None)
            for layer, block in enumerate(state.blocks)
        )
        hourglass = None if state.hourglass is None else HourglassState(*map(torch.empty_like, state.hourglass))
        past = None if state.last_tokens is None else torch.empty_like(state.last_tokens)
        after = ModelState(blocks, state.position + 1, hourglass, past)
        logits, full = self.run(token, state.position, _tensors(state), _tensors(after))
        return logits, after._replace(blocks=tuple(with_room(block, full) for block in after.blocks))

    def run(
        self, tokens: Tensor, positions: Tensor, before: States, after: States, separate: bool = False
    ) -> tuple[Tensor, bool]:
        """Step rows whose states lie `before` and `after`, by as many threads as are fastest (`step.decode`)."""
        inputs = (self._functions, self._packed, tokens, positions, before, after)
        return self._threads.run(lambda workers: step.decode(*inputs, workers, separate), torch.get_num_threads())


def as_packed(state: ModelState) -> ModelState:
    """Return the state in the dtypes of job.h, each tensor contiguous."""
    hourglass = state.hourglass and HourglassState(*map(_floats, state.hourglass))
    past = None if state.last_tokens is None else _integers(state.last_tokens)
    return ModelState(tuple(map(_block_as_packed, state.blocks)), _integers(state.position), hourglass, past)


def _block_as_packed(block: BlockState) -> BlockState:
    return BlockState(_attention_as_packed(block.attention), None if block.tail is None else _floats(block.tail))


def _attention_as_packed(attention: Any) -> Any:
    if isinstance(attention, ParallelState):
        return ParallelState(*map(_attention_as_packed, attention))
    if isinstance(attention, LinearState):
        S, z = attention
        if S.dtype == torch.float64:
            return LinearState(S.contiguous(), z.double().contiguous())
        return LinearState(_floats(S), _floats(z))
    if isinstance(attention, DeltaState):
        (S,) = attention
        return DeltaState(S.contiguous() if S.dtype == torch.float64 else _floats(S))
    if isinstance(attention, NgramState):
        S, number, ngram, waiting_ngram, waiting_v, recent_ngram, recent_v = attention
        table = _floats(S), _integers(number, torch.int32), _integers(ngram)
        waiting = _integers(waiting_ngram), _floats(waiting_v)
        recent = _integers(recent_ngram), _floats(recent_v)
        return NgramState(*table, *waiting, *recent)
    if isinstance(attention, KVCache):
        return KVCache(*map(_keys_and_values, attention))
    k, v, current = attention
    return WindowState(_floats(k), _floats(v), current.contiguous())


def _keys_and_values(cache: KeyValues) -> KeyValues:
    return KeyValues(_floats(cache.k), _floats(cache.v), cache.current.contiguous())


def _floats(x: Tensor) -> Tensor:
    return x if x.dtype is torch.float32 and x.is_contiguous() else x.float().contiguous()


def _integers(x: Tensor, dtype: torch.dtype = torch.long) -> Tensor:
    return x if x.dtype is dtype and x.is_contiguous() else x.to(dtype).contiguous()  # asked first, which is quicker


def empty_after(before: BlockState, phase: BlockPhase | None) -> BlockState:
    """Return empty tensors for the state of a layer after a token. A layer that reads whole blocks may have none to
    read, or not in each row."""
    if phase is not None and not phase.blocks:
        return before
    new = torch.empty_like if phase is None else torch.clone
    tail = None if before.tail is None else new(before.tail)
    if isinstance(before.attention, NgramState):
        return BlockState(NgramState(*before.attention[:5], *map(new, before.attention[5:])), tail)
    if isinstance(before.attention, KVCache):
        return BlockState(_one_more(before.attention, phase), tail)
    return BlockState(rebuild_state(before.attention, map(new, state_tensors(before.attention))), tail)


def _one_more(state: KVCache, phase: BlockPhase | None) -> KVCache:
    """Return room for one more recent token. In a layer that reads whole blocks a row may not take it, whose tokens
    then come last, or begin a document, to which no settled token belongs."""
    settled, (k, v, current) = state
    if phase is not None:
        recent = KeyValues(pad(k, (0, 0, 1, 0)), pad(v, (0, 0, 1, 0)), pad(current, (1, 0)))
        return KVCache(settled._replace(current=settled.current.clone()), recent)
    batch, kv_heads, time, head_dim = k.shape
    new_k, new_v = k.new_empty(batch, kv_heads, time + 1, head_dim), v.new_empty(batch, kv_heads, time + 1, v.shape[3])
    return KVCache(settled, KeyValues(new_k, new_v, current.new_empty(batch, time + 1)))


def layer_fields(block: BlockState) -> Sequence[int]:
    """Return the fields of a `LayerState`, in their order."""
    attention, tail = block
    tail_address = 0 if tail is None else tail.data_ptr()
    if isinstance(attention, ParallelState):
        first, window = layer_fields(BlockState(attention.recurrence, tail)), attention.window
        return *first[:2], *(x.data_ptr() for x in window), *first[5:]
    if isinstance(attention, LinearState):  # written out, since by names it takes as long as the layer itself
        S, z = attention
        return S.data_ptr(), z.data_ptr(), *NOTHING[:14], tail_address, S.dtype is torch.float64
    if isinstance(attention, DeltaState):
        S = attention.S
        return S.data_ptr(), *NOTHING[:15], tail_address, S.dtype is torch.float64
    if isinstance(attention, NgramState):
        table, *others = (x.data_ptr() for x in attention)
        return table, *NOTHING[:9], *others, tail_address, 0
    if isinstance(attention, KVCache):
        settled, recent = (
            (cache.k.data_ptr(), cache.v.data_ptr(), cache.current.data_ptr(), cache.k.shape[2]) for cache in attention
        )
        return 0, 0, *recent, *settled, *NOTHING[:6], tail_address, 0
    return 0, 0, *(x.data_ptr() for x in attention), *NOTHING[:11], tail_address, 0


def _tensors(state: ModelState) -> States:
    hourglass = None if state.hourglass is None else HourglassTensors(*state.hourglass)
    return States(step.layer_states(map(layer_fields, state.blocks)), hourglass, state.last_tokens)


def with_room(block: BlockState, full: bool) -> BlockState:
    """Return a layer's state with room for what the next token adds to it; `full` says that n-gram attention has
    none."""
    attention = block.attention
    if isinstance(attention, KVCache):
        return BlockState(cache_with_room(attention), block.tail)
    return BlockState(make_room(attention), block.tail) if full and isinstance(attention, NgramState) else block
