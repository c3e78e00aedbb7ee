"""Decode steps for rows that come and go: each row has its own state, which a step updates in place.

A batch whose state is one set of tensors must be copied whenever a row joins or leaves. Here a step takes any rows in
any order. With native code, each row has buffers of its own, so that no state is allocated or copied for a token. Large
tables, which steps do not write to, are shared with the state that a row started from. Otherwise torch runs the rows as
one batch, which is rebuilt when the rows change. With a CUDA graph, the batch is updated in place.

What a row learns from its text is never in a batch: it is large, and the rows of a batch may learn or not. Rows are
rows of text that is written, so their tokens are learned from only if the model learns from its own text.

B rows, V vocabulary, P last tokens.
"""

from array import array
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lmlong.model.graph_step import GraphBatch, GraphBatches, GraphStep, Recorder, cuda_graph
from lmlong.model.language_model import LanguageModel, ModelState
from lmlong.model.learning.read import step_learned
from lmlong.model.learning.state import Learned, will_learn_token
from lmlong.model.native_step import Kinds, NativeBlocks, NativeStep, joined, with_room
from lmlong.model.state import concat_states, state_row
from lmlong.native.decode.step import States
from lmlong.native.state import map_state


class NativeRow:
    """One row, with its state in a buffer that the next pass reads, and others that passes write to: one for the state
    after each token. A buffer that was given away as a state is not written to again."""

    def __init__(self, state: ModelState, kinds: Kinds, grows: bool):
        self.learned = state.learned
        self.position = int(state.position)
        self.last_tokens: list[int] | None = None if state.last_tokens is None else state.last_tokens[0].tolist()
        self._kinds, self._grows = kinds, grows
        self._now = NativeBlocks.of(kinds, state.blocks)
        self._after: list[NativeBlocks] = []  # each token of the last pass
        self._free: list[NativeBlocks] = []
        self._given = [self._now]

    def begin(self, tokens: int) -> list[NativeBlocks]:
        """Return the buffers before a pass over as many tokens, and after each of them."""
        self._release(self._after)
        self._after = []
        for _ in range(tokens):
            before = self._after[-1] if self._after else self._now
            self._after.append(self._free.pop() if self._free else before.empty_after())
        return [self._now, *self._after]

    def end(self, full: bool) -> int:
        """Return how many tokens of a pass the row has read: up to the first after which a state had no room left, and
        got new tensors. `full`: there may be one."""
        if full or self._grows:
            for index, written in enumerate(self._after):
                blocks = with_room(self._kinds, written, full)
                moved = any(new.attention is not old.attention for new, old in zip(blocks, written, strict=True))
                if moved or self._grows:
                    self._after[index] = NativeBlocks.of(self._kinds, blocks)
                if moved:
                    self._release(self._after[index + 1 :])
                    del self._after[index + 1 :]
        return len(self._after)

    def state(self, tokens: Sequence[int] = ()) -> ModelState:
        """Return the state after the first `tokens` of the last pass."""
        blocks = self._after[len(tokens) - 1] if tokens else self._now
        self._given.append(blocks)
        position, last = torch.tensor([self.position + len(tokens)]), self._last_tokens(tokens)
        past = None if last is None else torch.tensor([last], dtype=torch.long)
        return ModelState(blocks, position, None, past, self.learned)

    def advance(self, tokens: Sequence[int]) -> None:
        """Move to the state after the first `tokens` of the last pass."""
        self.last_tokens, self.position = self._last_tokens(tokens), self.position + len(tokens)
        read = [self._now, *self._after]
        self._now = read.pop(len(tokens))
        self._free = [blocks for blocks in self._free if blocks.origin is self._now.origin]
        self._release(read)
        self._after, self._given = [], [blocks for blocks in self._given if blocks is self._now]

    def _release(self, buffers: Iterable[NativeBlocks]) -> None:
        """Note that these buffers may be written to again, if they have the tensors of the present state that steps do
        not write to."""
        if not self._grows:
            given = {id(blocks) for blocks in self._given}
            fits = (blocks for blocks in buffers if blocks.origin is self._now.origin and id(blocks) not in given)
            self._free.extend(fits)

    def _last_tokens(self, tokens: Sequence[int]) -> list[int] | None:
        return None if self.last_tokens is None else [*self.last_tokens, *tokens][len(tokens) :]


class Pass(NamedTuple):
    """What a row gives after each of some tokens. It does not move until it advances."""

    tokens: list[int]
    logits: Tensor  # (N, V)
    hidden: Tensor  # (N, width)


class NativeRowStep:
    """Steps of rows by native code."""

    def __init__(self, model: LanguageModel, native: NativeStep):
        self._model, self._native = model, native

    def admit(self, state: ModelState) -> NativeRow:
        """Return a row that starts from the state of one text, which is not modified."""
        return NativeRow(state, self._native.kinds, self._native.grows)

    def __call__(self, rows: Sequence[Any], tokens: Tensor) -> Tensor:
        """Return logits (B, V) after one more token (B,) of each row."""
        last = [row.last_tokens for row in rows if row.last_tokens is not None]
        positions = array("q", [row.position for row in rows])
        before, after = zip(*(row.begin(1) for row in rows), strict=True)
        logits, hidden, full = self._run(array("q", tokens.tolist()), positions, before, after, last)
        learned = _learn(self._model, rows, tokens.long(), torch.tensor(positions), logits, hidden)
        for row, token in zip(rows, tokens.tolist(), strict=True):
            row.end(full)
            row.advance([token])
        _keep(rows, learned)
        return logits

    def ahead(self, row: NativeRow, tokens: Sequence[int]) -> Pass:
        """Read the next tokens of a row in one pass over the weights. What it gives is what steps would give, to the
        bit, without what the row learns. The pass may end early, before a token for which a state has no room."""
        buffers, first, last = row.begin(len(tokens)), row.position, []
        if row.last_tokens is not None:
            text = [*row.last_tokens, *tokens]
            last = [text[end - len(row.last_tokens) : end] for end in range(len(row.last_tokens), len(text))]
        positions = array("q", range(first, first + len(tokens)))
        logits, hidden, full = self._run(array("q", tokens), positions, buffers[:-1], buffers[1:], last, True)
        known = row.end(full)
        return Pass([*tokens[:known]], logits[:known], hidden[:known])

    def _run(
        self,
        tokens: array,
        positions: array,
        before: Sequence[NativeBlocks],
        after: Sequence[NativeBlocks],
        last: Sequence[list[int]],
        consecutive: bool = False,
    ) -> tuple[Tensor, Tensor, bool]:
        """Step; `last` are the last tokens before each token, if the model needs them."""
        past = array("q", chain.from_iterable(last)) if last else None
        unread = past and array("q", past)  # rows keep their last tokens themselves
        states = States(joined(before), None, past), States(joined(after), None, unread)
        return self._native.run(tokens, positions, *states, consecutive)


class TorchRow:
    """A row, stored as an index into the batch of its last step."""

    def __init__(self, state: ModelState):
        self.batch, self.index, self.learned = state._replace(learned=None), 0, state.learned

    def state(self) -> ModelState:
        """Return a copy of the state after the tokens so far; later steps do not change it."""
        return map_state(torch.clone, state_row(self.batch, self.index))._replace(learned=self.learned)


class TorchRowStep:
    """Steps of rows by torch, as one batch."""

    def __init__(self, model: LanguageModel):
        self._model = model
        self._stepped: list[TorchRow] = []

    def admit(self, state: ModelState) -> TorchRow:
        """Return a row that starts from the state of one text, which is not modified."""
        return TorchRow(state)

    @torch.inference_mode()
    def __call__(self, rows: Sequence[Any], tokens: Tensor) -> Tensor:
        """Return logits (B, V) after one more token (B,) of each row."""
        batch = rows[0].batch if _same(rows, self._stepped) else _joined_states(rows)
        tokens = tokens.to(batch.position.device)
        logits, hidden, state = self._model.decode(tokens, batch)
        learned = _learn(self._model, rows, tokens, batch.position, logits, hidden)
        self._place(rows, state)
        _keep(rows, learned)
        return logits

    def _place(self, rows: Sequence[TorchRow], batch: ModelState) -> None:
        for index, row in enumerate(rows):
            row.batch, row.index = batch, index
        self._stepped = list(rows)


class GraphRowStep(TorchRowStep):
    """Steps of rows by CUDA graphs. The rows that have stepped last are in tensors of its own; before other rows step,
    they get a copy."""

    def __init__(self, model: LanguageModel, record: Recorder = cuda_graph):
        super().__init__(model)
        self._batches = GraphBatches(model, record)
        self._batch: GraphBatch | None = None

    @torch.inference_mode()
    def __call__(self, rows: Sequence[Any], tokens: Tensor) -> Tensor:
        """Return logits (B, V) after one more token (B,) of each row."""
        if self._batch is None or not _same(rows, self._stepped):
            self._batch = self._load(rows)
        batch = self._batch
        phase = self._model.block_phase(batch.state, None, 1)
        before = batch.copy() if any(row.learned is not None for row in rows) else None
        logits, hidden = batch.step(tokens, phase)
        if before is not None:
            try:
                _keep(rows, _learn(self._model, rows, tokens.to(logits.device), before.position, logits, hidden))
            except BaseException:
                batch.load(before)
                raise
        return logits

    def _load(self, rows: Sequence[TorchRow]) -> GraphBatch:
        """Return the batch of these rows, after those of the last step have left theirs."""
        if self._batch is not None:
            copied = self._batch.copy()
            for row in self._stepped:
                row.batch = copied
        state = _joined_states(rows)
        batch = self._batches.of(state)
        batch.load(state)
        self._place(rows, batch.state)
        return batch


def _learn(
    model: LanguageModel, rows: Sequence[Any], tokens: Tensor, positions: Tensor, logits: Tensor, hidden: Tensor
) -> list[Learned | None]:
    """Return what each row has learned after its token (B,) at its position (B,), given the hidden states (B, width).
    Replace the logits (B, V) of rows that learn by theirs."""
    learned: list[Learned | None] = []
    for index, row in enumerate(rows):
        after = row.learned
        if after is not None:
            one = slice(index, index + 1)
            inputs = (tokens[one], hidden[one], logits[one], positions[one])
            logits[one], after = step_learned(model, *inputs, after)
            after = will_learn_token(after, False)
        learned.append(after)
    return learned


def _keep(rows: Sequence[Any], learned: Sequence[Learned | None]) -> None:
    for row, after in zip(rows, learned, strict=True):
        row.learned = after


Row = NativeRow | TorchRow
RowStep = NativeRowStep | TorchRowStep


def make_row_step(model: LanguageModel) -> RowStep:
    """Return the step of rows by native code or a CUDA graph if it decodes the model, else by torch."""
    if isinstance(model.fast_step, NativeStep) and model.hourglass is None:
        return NativeRowStep(model, model.fast_step)
    return GraphRowStep(model) if isinstance(model.fast_step, GraphStep) else TorchRowStep(model)


def _same(rows: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(rows) == len(others) and all(a is b for a, b in zip(rows, others, strict=True))


def _joined_states(rows: Sequence[Any]) -> ModelState:
    return concat_states([state_row(row.batch, row.index) for row in rows])
