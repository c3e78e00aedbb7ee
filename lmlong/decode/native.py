"""The engine of native code, on a CPU. Each row has buffers of its own, so that a token allocates and copies no state.

Large tables, which a pass does not write to, are shared with the state that a row started from.

B rows, N tokens of each row, P last tokens, V vocabulary.
"""

import ctypes
import time
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
from lmlong.decode.engine import Engine, Pass, Row
from lmlong.decode.packed_model import PackedModel
from lmlong.model.block import BlockState
from lmlong.model.hourglass import HourglassState
from lmlong.model.language_model import LanguageModel, ModelState
from lmlong.native.build import NativeLibrary, load
from lmlong.native.decode.kind import DecodeKind, native
from lmlong.native.decode.step import step_code
from lmlong.native.decode.structures import DecodeJob
from lmlong.native.source import NativeCode
from lmlong.native.state import map_state
from lmlong.native.threads import ThreadChoice, give_barrier, run_on_threads
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


def code() -> NativeCode:
    return step_code(native_kinds().values(), CONSTANTS)


@cache
def library() -> NativeLibrary | None:
    """Return the native code, or None if it is unavailable."""
    functions = load(code(), "tokens are written by torch, slower")
    if functions is not None:
        functions.scratch_size.argtypes = [ctypes.c_void_p, ctypes.c_int64]
        functions.scratch_size.restype = ctypes.c_int64
    return functions


class Buffers:
    """The state of a row, with the addresses of its tensors, which are read only once."""

    def __init__(
        self,
        kinds: Sequence[DecodeKind[Any]],
        blocks: Iterable[BlockState],
        hourglass: HourglassState | None,
        origin: object | None = None,
    ):
        self.blocks, self.hourglass = tuple(blocks), hourglass
        self.origin = origin or object()
        """Identifies the tensors that passes do not write to."""
        self.addresses = array("q")
        for kind, (attention, tail) in zip(kinds, self.blocks, strict=True):
            self.addresses.append(0 if tail is None else tail.data_ptr())
            self.addresses.extend(kind.fields(attention))
        self.addresses.extend(x.data_ptr() for x in hourglass or ())


class NativeRow(Row):
    """A row with the buffer of its state, and those after each token of its last pass. A buffer that was given away as
    a state is not written to again."""

    def __init__(self, state: ModelState, now: Buffers):
        super().__init__(state)
        self.keeps_tokens = state.last_tokens is not None
        self.last_tokens = state.last_tokens[0].tolist() if state.last_tokens is not None else []
        self.now = now
        self.tokens: Sequence[int] = ()
        """The tokens of the last pass."""
        self.after: list[Buffers] = []
        self.free: list[Buffers] = []
        self.given = [now]

    def release(self, buffers: Iterable[Buffers]) -> None:
        """Note buffers that passes may write to again: those with the tensors of the present state that passes do not
        write to."""
        given = {id(buffer) for buffer in self.given}
        self.free += [buffer for buffer in buffers if buffer.origin is self.now.origin and id(buffer) not in given]


class NativeEngine(Engine):
    """Runs rows by native code, which must be available."""

    reads_ahead = True

    def __init__(self, model: LanguageModel):
        super().__init__(model)
        functions, self.packed = library(), PackedModel(model)
        assert functions is not None
        self._functions, self._kinds = functions, self.packed.kinds
        self._grows = any(kind.grows for kind in self._kinds)
        self._reuses = not self._grows and model.hourglass is None
        self._threads, self._threads_ahead = ThreadChoice(), ThreadChoice()

    @property
    def is_stale(self) -> bool:
        return self.packed.is_stale

    def load(self, state: ModelState) -> NativeRow:
        blocks = (
            BlockState(kind.as_native(attention), None if tail is None else native(tail))
            for kind, (attention, tail) in zip(self._kinds, state.blocks, strict=True)
        )
        return NativeRow(state, Buffers(self._kinds, blocks, map_state(native, state.hourglass)))

    def read(self, rows: Sequence[Any], tokens: Sequence[Sequence[int]]) -> Pass:
        ahead, before, after = len(tokens[0]), array("q"), array("q")
        assert ahead == 1 or len(rows) == 1
        for row, each in zip(rows, tokens, strict=True):
            self._begin(row, each)
            for index, buffers in enumerate(row.after):
                before += (row.after[index - 1] if index else row.now).addresses
                after += buffers.addresses
        text = array("q", chain.from_iterable(tokens))
        positions = array("q", [row.position + index for row in rows for index in range(ahead)])
        last = array("q", chain.from_iterable(chain.from_iterable(map(_last_tokens, rows))))
        choice = self._threads if ahead == 1 else self._threads_ahead
        workers, begun = choice.threads(torch.get_num_threads()), time.perf_counter()
        logits, hidden, full = self._decode((len(rows), ahead), (before, after, text, positions, last), workers)
        choice.note(workers, time.perf_counter() - begun)
        for row in rows:
            self._make_room(row, full)
        read = len(rows[0].after)
        known = [[*row.tokens[:read]] for row in rows]
        if read < ahead:
            logits, hidden = logits[:, :read], hidden[:, :read]
        return Pass(known, logits, hidden)

    def _decode(self, shape: tuple[int, int], inputs: Sequence[array], workers: int) -> tuple[Tensor, Tensor, bool]:
        """Return the logits (B, N, V) and the last hidden states (B, N, width) of a pass on `workers` threads, which
        fills the states after it, and whether a state has no room for another token.

        `inputs` are int64: the addresses of the states before each token and after it, the tokens (B * N,), their
        positions in their documents, and the last tokens (B * N, P) before each."""
        model, (before, after, tokens, _, last_tokens) = self.packed.model, inputs
        assert len(before) * before.itemsize == len(after) * after.itemsize == model.state_size * len(tokens)
        assert len(last_tokens) == model.past_tokens * len(tokens)
        logits = torch.empty(*shape, model.output.outputs, dtype=torch.float32, device="cpu")
        hidden = torch.empty(*shape, model.width, dtype=torch.float32, device="cpu")
        job = DecodeJob(ctypes.addressof(model), *(numbers.buffer_info()[0] for numbers in inputs))
        job.logits, job.hidden = logits.data_ptr(), hidden.data_ptr()
        job.rows, job.consecutive = len(tokens), shape[1] > 1
        give_barrier(job, workers)
        size = self._functions.scratch_size(ctypes.byref(job), workers)
        scratch = torch.empty(size, dtype=torch.float32, device="cpu")
        job.scratch = scratch.data_ptr()
        run_on_threads(self._functions.decode_step, job, workers)
        if job.invalid:
            raise IndexError("decode: a token is not in the vocabulary, or a position is negative")
        return logits, hidden, bool(job.full)

    def advance(self, row: NativeRow, tokens: int) -> None:
        row.last_tokens = [*row.last_tokens, *row.tokens[:tokens]][tokens:]
        row.position += tokens
        buffers = [row.now, *row.after]
        row.now = buffers.pop(tokens)
        row.free = [buffer for buffer in row.free if buffer.origin is row.now.origin]
        if self._reuses:
            row.release(buffers)
        row.after, row.tokens, row.given = [], (), [buffer for buffer in row.given if buffer is row.now]

    def save(self, row: NativeRow, tokens: int = 0) -> ModelState:
        buffers = row.after[tokens - 1] if tokens else row.now
        row.given.append(buffers)
        last = [*row.last_tokens, *row.tokens[:tokens]][tokens:]
        past = torch.tensor([last], dtype=torch.long) if row.keeps_tokens else None
        position = torch.tensor([row.position + tokens])
        return ModelState(buffers.blocks, position, buffers.hourglass, past, row.learned)

    def _begin(self, row: NativeRow, tokens: Sequence[int]) -> None:
        """Give a row buffers for the states after each of some tokens."""
        if self._reuses:
            row.release(row.after)
        row.tokens, row.after = tokens, []
        before = row.now
        for position in range(row.position, row.position + len(tokens)):
            before = row.free.pop() if row.free else self._empty_after(before, position)
            row.after.append(before)

    def _empty_after(self, before: Buffers, position: int) -> Buffers:
        """Return buffers for the state after a token. Downsampled layers keep theirs between the ends of blocks."""
        skipped = self._skipped_layers(position)
        blocks = [
            BlockState(kind.empty_after(attention), None if tail is None else torch.empty_like(tail))
            for kind, (attention, tail) in zip(self._kinds, before.blocks, strict=True)
        ]
        blocks[skipped] = before.blocks[skipped]
        return Buffers(self._kinds, blocks, map_state(torch.empty_like, before.hourglass), before.origin)

    def _skipped_layers(self, position: int) -> slice:
        """Return the layers that do not read the token at a position."""
        hourglass, layers = self.model.hourglass, self.model.downsampled_layers
        ends_block = hourglass is None or position % hourglass.factor == hourglass.factor - 1
        return slice(0, 0) if ends_block else slice(layers.start, layers.stop)

    def _make_room(self, row: NativeRow, full: bool) -> None:
        """Give the states after a pass room for the next token. The pass ends at the first one that gets new tensors.
        `full`: a state of constant size may have no room."""
        if not (full or self._grows):
            return
        for index, buffers in enumerate(row.after):
            pairs = zip(self._kinds, buffers.blocks, strict=True)
            blocks = [block._replace(attention=kind.with_room(block.attention, full)) for kind, block in pairs]
            if any(new.attention is not old.attention for new, old in zip(blocks, buffers.blocks, strict=True)):
                row.after[index] = Buffers(self._kinds, blocks, buffers.hourglass)
                ended = row.after[index + 1 :]
                del row.after[index + 1 :]
                if self._reuses:
                    row.release(ended)


def _last_tokens(row: NativeRow) -> list[list[int]]:
    """Return the last tokens that the model needs before each token of a row's pass."""
    past = len(row.last_tokens)
    text = [*row.last_tokens, *row.tokens]
    return [text[end : end + past] for end in range(len(row.tokens))] if past else []
