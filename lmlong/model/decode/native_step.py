"""One decode step of a whole model in one call of native code, on a CPU."""

import ctypes
from array import array
from functools import cache
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from lmlong.attention.feature_maps import ELU_FLOOR, Cosine, Relu, Softmax
from lmlong.attention.gates import MIN_LOG_DECAY
from lmlong.attention.linear.autograd import MIN_DENOMINATOR
from lmlong.attention.linear.naive import LinearState
from lmlong.model.block import BlockState
from lmlong.model.decode import structures
from lmlong.model.decode.pack import PackedModel
from lmlong.model.decode.structures import Job
from lmlong.model.hourglass import BlockPhase, HourglassState
from lmlong.model.language_model import LanguageModel, ModelState
from lmlong.model.rope import ROPE_BASE
from lmlong.native.build import compiled
from lmlong.native.threads import run_on_threads, thread_team

CODE = Path(__file__).parent
CONSTANTS = {
    "MIN_DENOMINATOR": MIN_DENOMINATOR,
    "ELU_FLOOR": ELU_FLOOR,
    "RELU_FLOOR": Relu.FLOOR,
    "COSINE_SHRINK": Cosine.SHRINK,
    "COSINE_TINY": Cosine.TINY,
    "SOFTMAX_FLOOR": Softmax.FLOOR,
    "MIN_LOG_DECAY": MIN_LOG_DECAY,
    "ROPE_BASE": ROPE_BASE,
}


@cache
def library() -> ctypes.CDLL | None:
    """Return the library, compiled at its first use on a machine; None where it cannot be."""
    functions = compiled(CODE, CONSTANTS, "tokens are written by torch, slower")
    if functions is not None:
        functions.scratch_size.argtypes = [ctypes.c_void_p, ctypes.c_int64]
        functions.scratch_size.restype = ctypes.c_int64
        functions.structures_size.restype = ctypes.c_int64
        own = map(ctypes.sizeof, (structures.Layer, structures.Model, structures.Job))
        assert functions.structures_size() == sum(own), "structures.py and job.h differ"
    return functions


class NativeStep:
    """`LanguageModel.step` of a model whose weights are final."""

    def __init__(self, model: LanguageModel, functions: ctypes.CDLL):
        self._functions, self._packed = functions, PackedModel(model)
        self._vocabulary, self._downsampled = model.embedding.num_embeddings, model.downsampled_layers

    def __call__(self, token: Tensor, state: ModelState, phase: BlockPhase | None) -> tuple[Tensor, ModelState]:
        token, state = token.long().contiguous(), _as_packed(state)
        assert token.device.type == "cpu" and token.shape == state.position.shape
        after = tuple(
            _empty_after(block, phase if layer in self._downsampled else None)
            for layer, block in enumerate(state.blocks)
        )
        hourglass = None if state.hourglass is None else HourglassState(*map(torch.empty_like, state.hourglass))
        new = ModelState(after, state.position + 1, hourglass)
        return self._write(token, state, new), new

    def _write(self, token: Tensor, state: ModelState, new: ModelState) -> Tensor:
        """Fill the new state, and return the logits."""
        logits = torch.empty(len(token), self._vocabulary, dtype=torch.float32, device="cpu")
        # addresses as plain numbers, since there are many, and new ones for each token
        addresses = array("q", chain.from_iterable(map(_addresses, chain(state.blocks, new.blocks))))
        address, count = addresses.buffer_info()
        job = Job(ctypes.addressof(self._packed.model), address, address + count // 2 * addresses.itemsize)
        if state.hourglass is not None and new.hourglass is not None:
            job.tail_before, job.upsampled_before = (x.data_ptr() for x in state.hourglass)
            job.tail_after, job.upsampled_after = (x.data_ptr() for x in new.hourglass)
        job.tokens, job.positions, job.logits = token.data_ptr(), state.position.data_ptr(), logits.data_ptr()
        job.rows = len(token)
        workers, team = torch.get_num_threads(), thread_team()
        if workers > 1 and team is not None:
            functions = (team.barrier, team.thread_num, team.num_threads)
            job.barrier, job.thread_num, job.num_threads = (ctypes.cast(x, ctypes.c_void_p) for x in functions)
        size = self._functions.scratch_size(ctypes.byref(job), workers)
        scratch = torch.empty(size, dtype=torch.float32, device="cpu")
        job.scratch = scratch.data_ptr()
        run_on_threads(self._functions.decode_step, job, workers)
        return logits


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


def _addresses(state: BlockState) -> tuple[int, int, int, int, bool]:
    """Return the addresses of the state of a layer: `LayerState` in job.h."""
    (first, second, *current), tail = state
    return (
        first.data_ptr(),
        second.data_ptr(),
        current[0].data_ptr() if current else 0,
        0 if tail is None else tail.data_ptr(),
        first.dtype == torch.float64,
    )
