"""The engine of CUDA graphs: the operations of a step are recorded once, and replayed for each token.

On a GPU, launching the operations of a step takes longer than computing them. A CUDA graph launches all of them at
once, but always on the same addresses, so the engine has tensors of its own for the token and the state.

B rows, V vocabulary.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lmlong.decode.engine import EagerEngine, EagerRow, Pass, joined, place
from lmlong.model.language_model import LanguageModel, ModelState
from lmlong.model.state import rebuild_state
from lmlong.model.stretch import BlockPhase, any_phase
from lmlong.native.state import map_state, state_tensors

MAX_BATCHES = 8
"""Maximum number of batch sizes whose state and graphs are in memory."""

WARM_UP = 2
"""Steps before the recording, in which libraries load kernels and allocate memory that no graph may contain."""

ALIGNMENT = 16
"""Bytes that kernels load at once."""

Outputs = tuple[Tensor, Tensor]
"""Logits (B, V) and last hidden states (B, width)."""

Run = Callable[[], Outputs]
"""A step between fixed tensors."""


def cuda_graph(run: Run) -> Run:
    """Return a function that replays the operations of `run`. Its result is overwritten by the next replay."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads may allocate memory meanwhile
        outputs = run()

    def replay() -> Outputs:
        graph.replay()
        return outputs

    return replay


Recorder = Callable[[Run], Run]
"""Returns a function that repeats the operations of a call, on the same tensors."""


class GraphBatch:
    """The tensors of a state of B rows, and the graphs that step it, one for each block phase."""

    @torch.inference_mode()
    def __init__(self, model: LanguageModel, like: ModelState, record: Recorder):
        self._model, self._record = model, record
        self._graphs: dict[BlockPhase | None, Run] = {}
        self._token = torch.zeros_like(like.position)
        # a state may come in other dtypes than those in which steps keep it
        *_, after = model.decode_step(
            self._token, model.settle(like), any_phase(model.hourglass.factor, 1) if model.hourglass else None
        )
        self._form = map_state(lambda x: x.to("meta"), after)
        size = sum(_aligned(x.nbytes) for x in state_tensors(self._form))
        # one block of memory, so that one operation copies it
        self._memory = torch.empty(size, dtype=torch.uint8, device=self._token.device)
        self._tensors = list(_parts(self._memory, state_tensors(self._form)))
        self.state: ModelState = rebuild_state(self._form, iter(self._tensors))  # the next step overwrites it
        blocks = zip(model.attentions, self.state.blocks, strict=True)
        owned = (block._replace(attention=attention.owned(block.attention)) for attention, block in blocks)
        self._owned = self.state._replace(blocks=tuple(owned))

    @torch.inference_mode()
    def load(self, state: ModelState) -> None:
        for tensor, given in zip(self._tensors, state_tensors(self._model.settle(state)), strict=True):
            tensor.copy_(given)

    @torch.inference_mode()
    def step(self, token: Tensor, phase: BlockPhase | None) -> Outputs:
        """Return the outputs after one more token of each row (B,)."""
        self._token.copy_(token)
        if phase not in self._graphs:
            before = self._memory.clone()
            try:
                self._graphs[phase] = self._record(partial(self._run, phase))
            finally:
                self._memory.copy_(before)
        logits, hidden = self._graphs[phase]()
        return logits.clone(), hidden.clone()

    def copy(self) -> ModelState:
        """Return a copy of the state."""
        return rebuild_state(self._form, _parts(self._memory.clone(), state_tensors(self._form)))

    def _run(self, phase: BlockPhase | None) -> Outputs:
        logits, hidden, after = self._model.decode_step(self._token, self._owned, phase)
        for tensor, new in zip(self._tensors, state_tensors(after), strict=True):
            if new is not tensor:  # else it is written in place, or stays the same
                tensor.copy_(new)
        return logits, hidden


class GraphEngine(EagerEngine):
    """Runs rows by CUDA graphs. The rows of the last pass are in tensors of its own, which the next pass overwrites."""

    copies_states = True

    def __init__(self, model: LanguageModel, record: Recorder = cuda_graph):
        assert model.constant_state
        super().__init__(model)
        self._record = record
        self._batches: dict[int, GraphBatch] = {}  # of each number of rows, the most recently used last
        self._batch: GraphBatch | None = None
        self._rows: Sequence[EagerRow] = ()

    def step(self, rows: Sequence[Any], tokens: Sequence[int], learn_next: bool = False) -> Tensor:
        if any(row.learned is not None for row in rows):
            return super().step(rows, tokens, learn_next)
        logits, _ = self._run(self._load(rows), tokens)
        for row in rows:
            row.position += 1
        return logits

    def read(self, rows: Sequence[Any], tokens: Sequence[Sequence[int]]) -> Pass:
        batch = self._load(rows)
        before = batch.copy()
        logits, hidden = self._run(batch, [token for (token,) in tokens])
        place(rows, before, batch.state)
        return Pass([[*row] for row in tokens], logits[:, None], hidden[:, None])

    def save(self, row: EagerRow, tokens: int = 0) -> ModelState:
        return map_state(torch.clone, super().save(row, tokens))

    def _load(self, rows: Sequence[EagerRow]) -> GraphBatch:
        """Return the batch that holds the states of rows. Other rows in its tensors get a copy."""
        state = joined(rows)
        if self._batch is None or state is not self._batch.state:
            if self._batch is not None:
                self._release(self._batch)
            self._batch, self._rows = self._batch_of(state), rows
            self._batch.load(state)
            place(rows, self._batch.state)
        return self._batch

    def _batch_of(self, state: ModelState) -> GraphBatch:
        """Return the batch for a state of this size."""
        rows, batches = len(state.position), self._batches
        batches[rows] = batches.pop(rows) if rows in batches else GraphBatch(self.model, state, self._record)
        if len(batches) > MAX_BATCHES:
            batches.pop(next(iter(batches)))
        return batches[rows]

    def _release(self, batch: GraphBatch) -> None:
        copied = batch.copy()
        for row in self._rows:
            if row.batch is batch.state:
                row.batch = copied
            if row.after is batch.state:
                row.after = copied

    def _run(self, batch: GraphBatch, tokens: Sequence[int]) -> Outputs:
        return batch.step(torch.tensor(tokens), self.model.block_phase(batch.state, None, 1))


def _parts(memory: Tensor, form: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield tensors of the shapes and dtypes of `form` in a block of bytes."""
    begin = 0
    for x in form:
        yield memory[begin : begin + x.nbytes].view(x.dtype).view(x.shape)
        begin += _aligned(x.nbytes)


def _aligned(size: int) -> int:
    """Return the number of bytes after which another tensor may begin."""
    return -(-size // ALIGNMENT) * ALIGNMENT
