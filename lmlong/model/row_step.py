"""Decode steps for rows that come and go: each row has its own state, which a step updates in place.

A batch whose state is one set of tensors must be copied whenever a row joins or leaves. Here a step takes any rows in
any order. With native code, each row has two buffers: a step reads one and writes the other, so that no state is
allocated or copied for a token. Large tables, which steps do not write to, are shared with the state that a row started
from. Otherwise torch runs the rows as one batch, which is rebuilt when the rows change. With a CUDA graph, the batch is
updated in place.

What a row learns from its text is never in a batch: it is large, and the rows of a batch may learn or not. Rows are
rows of text that is written, so their tokens are learned from only if the model learns from its own text.

B rows, V vocabulary, P last tokens.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lmlong.model.graph_step import GraphBatch, GraphBatches, GraphStep, Recorder, cuda_graph
from lmlong.model.language_model import LanguageModel, ModelState
from lmlong.model.learning.state import Learned, will_learn_token
from lmlong.model.native_step import Kinds, NativeBlocks, NativeStep, joined, with_room
from lmlong.model.state import concat_states, state_row
from lmlong.native.decode.kind import native
from lmlong.native.decode.step import States
from lmlong.native.state import map_state


class NativeRow:
    """The two buffers of one row. A state that grows gets new buffers for each token."""

    before: NativeBlocks
    """The buffer that a step reads."""

    after: NativeBlocks
    """The buffer that it writes."""

    def __init__(self, state: ModelState, kinds: Kinds, grows: bool):
        self.learned = state.learned
        self.grows = grows
        self.position = int(state.position)
        self.last_tokens = map_state(native, state.last_tokens)
        blocks = NativeBlocks.of(kinds, state.blocks)
        self._use(blocks if grows else blocks.copied())

    def advance(self, token: int, full: bool) -> None:
        """Make the buffer that a step has written the current state; `full`: some state may have no room left."""
        self.position += 1
        if self.last_tokens is not None:
            self.last_tokens = torch.cat([self.last_tokens, self.last_tokens.new_tensor([[token]])], dim=1)[:, 1:]
        written = self.after
        blocks = with_room(written.kinds, written, full) if self.grows or full else written
        moved = any(new.attention is not old.attention for new, old in zip(blocks, written, strict=True))
        if self.grows or moved:
            self._use(NativeBlocks.of(written.kinds, blocks))
        else:
            self.before, self.after = written, self.before

    def state(self) -> ModelState:
        """Return a copy of the state after the tokens so far; later steps do not change it."""
        return ModelState(self.before.copied(), torch.tensor([self.position]), None, self.last_tokens, self.learned)

    def _use(self, blocks: NativeBlocks) -> None:
        """Use these tensors as the buffer that the next step reads, and allocate the other buffer."""
        self.before, self.after = blocks, blocks.empty_after()


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
        past = torch.cat(last) if last else None
        unread = None if past is None else torch.empty_like(past)  # rows keep their last tokens themselves
        before = States(joined([row.before.fields for row in rows]), None, past)
        after = States(joined([row.after.fields for row in rows]), None, unread)
        tokens, positions = tokens.long().contiguous(), torch.tensor([row.position for row in rows])
        logits, hidden, full = self._native.run(tokens, positions, before, after, separate=True)
        learned = _learn(self._model, rows, tokens, positions, logits, hidden)
        for row, token in zip(rows, tokens.tolist(), strict=True):
            row.advance(token, full)
        _keep(rows, learned)
        return logits


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
        logits, hidden, state = self._model.step_unlearned(tokens, batch)
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
            logits[one], after = model.step_learned(*inputs, after)
            after = will_learn_token(after, model.learns_own_text)
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
