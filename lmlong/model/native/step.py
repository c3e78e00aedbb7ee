"""The step of a model by native code on a CPU: all its parts in one call, for what `LanguageModel.answer` does."""

import ctypes
from array import array
from functools import cache
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from lmlong.attention.features import ELU_FLOOR, Cosine, Relu, Softmax
from lmlong.attention.scan import ScanState
from lmlong.attention.spans import SMALLEST
from lmlong.model.block import FASTEST_DECAY, BlockState
from lmlong.model.downsample import Beat, HourglassState
from lmlong.model.language_model import LanguageModel, ModelState
from lmlong.model.native import structures
from lmlong.model.native.layout import Layout
from lmlong.model.native.structures import Job
from lmlong.model.positions import BASE
from lmlong.native.library import compiled, run, team

CODE = Path(__file__).parent
CONSTANTS = {
    "SMALLEST": SMALLEST,
    "ELU_FLOOR": ELU_FLOOR,
    "RELU_FLOOR": Relu.FLOOR,
    "COSINE_SHRINK": Cosine.SHRINK,
    "COSINE_TINY": Cosine.TINY,
    "SOFTMAX_FLOOR": Softmax.FLOOR,
    "FASTEST_DECAY": FASTEST_DECAY,
    "ROTARY_BASE": BASE,
}


@cache
def library() -> ctypes.CDLL | None:
    """The library, compiled at its first use on a machine; None where that cannot be."""
    functions = compiled(CODE, CONSTANTS, "tokens are written by torch, slower")
    if functions is not None:
        functions.scratch_size.argtypes = [ctypes.c_void_p, ctypes.c_int64]
        functions.scratch_size.restype = ctypes.c_int64
        functions.bytes_of_structures.restype = ctypes.c_int64
        own = map(ctypes.sizeof, (structures.Layer, structures.Model, structures.Job))
        assert functions.bytes_of_structures() == sum(own), "structures.py and job.h differ"
    return functions


class NativeStep:
    """`LanguageModel.answer` of a model that learns no more."""

    def __init__(self, model: LanguageModel, functions: ctypes.CDLL):
        self._functions, self._layout = functions, Layout(model)
        self._vocabulary, self._inside = model.embedding.num_embeddings, model.shortened

    def __call__(self, token: Tensor, state: ModelState, beat: Beat | None) -> tuple[Tensor, ModelState]:
        token, state = token.long().contiguous(), _as_expected(state)
        assert token.device.type == "cpu" and token.shape == state.position.shape
        after = tuple(_room(block, beat if layer in self._inside else None) for layer, block in enumerate(state.blocks))
        around = None if state.hourglass is None else HourglassState(*map(torch.empty_like, state.hourglass))
        new = ModelState(after, state.position + 1, around)
        return self._write(token, state, new), new

    def _write(self, token: Tensor, state: ModelState, new: ModelState) -> Tensor:
        """Fill the new state, and return the logits."""
        logits = torch.empty(len(token), self._vocabulary, dtype=torch.float32, device="cpu")
        # addresses as plain numbers, for they are many, and each token has its own
        places = array("q", chain.from_iterable(map(_places, chain(state.blocks, new.blocks))))
        address, count = places.buffer_info()
        job = Job(ctypes.addressof(self._layout.model), address, address + count // 2 * places.itemsize)
        if state.hourglass is not None and new.hourglass is not None:
            job.pooled_before, job.given_before = (x.data_ptr() for x in state.hourglass)
            job.pooled_after, job.given_after = (x.data_ptr() for x in new.hourglass)
        job.tokens, job.positions, job.logits = token.data_ptr(), state.position.data_ptr(), logits.data_ptr()
        job.rows = len(token)
        workers, known = torch.get_num_threads(), team()
        if workers > 1 and known is not None:
            of_team = (known.meet, known.number, known.count)
            job.meet, job.number, job.count = (ctypes.cast(x, ctypes.c_void_p) for x in of_team)
        size = self._functions.scratch_size(ctypes.byref(job), workers)
        scratch = torch.empty(size, dtype=torch.float32, device="cpu")
        job.scratch = scratch.data_ptr()
        run(self._functions.write_tokens, job, workers)
        return logits


def _as_expected(state: ModelState) -> ModelState:
    """The same state in the types that job.h has, each tensor in one piece."""
    around = state.hourglass and HourglassState(*map(_floats, state.hourglass))
    return ModelState(tuple(map(_block_as_expected, state.blocks)), state.position.long().contiguous(), around)


def _block_as_expected(block: BlockState) -> BlockState:
    attention, tail = block.attention, None if block.tail is None else _floats(block.tail)
    if isinstance(attention, ScanState) and attention.S.dtype == torch.float64:
        return BlockState(ScanState(attention.S.contiguous(), attention.z.double().contiguous()), tail)
    parts = (x.contiguous() if x.dtype == torch.bool else _floats(x) for x in attention)
    return BlockState(type(attention)(*parts), tail)


def _floats(x: Tensor) -> Tensor:
    return x.float().contiguous()


def _room(before: BlockState, beat: Beat | None) -> BlockState:
    """For the state of a layer after a token. A layer that reads whole blocks may have none to read, or not in each
    row."""
    if beat is not None and not beat.blocks:
        return before
    new = torch.empty_like if beat is None else torch.clone
    tail = None if before.tail is None else new(before.tail)
    return BlockState(type(before.attention)(*map(new, before.attention)), tail)


def _places(state: BlockState) -> tuple[int, int, int, int, bool]:
    """Where the state of a layer lies: `Memory` in job.h."""
    (first, second, *current), tail = state
    return (
        first.data_ptr(),
        second.data_ptr(),
        current[0].data_ptr() if current else 0,
        0 if tail is None else tail.data_ptr(),
        first.dtype == torch.float64,
    )
