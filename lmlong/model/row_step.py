"""Decode steps for rows that come and go: each row has a state of its own, which a step changes where it lies.

A batch whose state is one set of tensors must be copied whenever a row joins or leaves. Here a step is given any rows
in any order. By native code each row has two buffers, of which a step reads one and writes the other, so no state is
allocated or copied for a token; large tables, which steps do not write to, are shared with the state that a row began
with. Elsewhere torch runs the rows as one batch, which is put together anew when other rows are to step.

B rows, V vocabulary, P last tokens.
"""

from array import array
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from lmlong.attention.base import state_tensors
from lmlong.attention.ngram.hashing import NO_NGRAM
from lmlong.attention.ngram.state import NgramState
from lmlong.attention.softmax import KVCache
from lmlong.model.block import BlockState
from lmlong.model.language_model import LanguageModel, ModelState
from lmlong.model.native_step import NativeStep, as_packed, empty_after, layer_fields, with_room
from lmlong.model.state import concat_states, rebuild_state, state_row
from lmlong.native.decode import step


class Row(Protocol):
    """One text among others."""

    def state(self) -> ModelState:
        """Return the state after the tokens so far, which no later step changes."""


class RowStep(Protocol):
    """Decode steps of rows that come and go."""

    def admit(self, state: ModelState) -> Row:
        """Return a row that begins with the state of one text, which stays as it is."""

    def __call__(self, rows: Sequence[Any], tokens: Tensor) -> Tensor:
        """Return logits (B, V) after one more token (B,) of each row."""


def make_row_step(model: LanguageModel) -> RowStep:
    """Return the steps of rows by native code where that decodes the model, else by torch."""
    if isinstance(model.fast_step, NativeStep) and model.hourglass is None:
        return NativeRowStep(model.fast_step)
    return TorchRowStep(model)


class NativeRow:
    """The two buffers of one row. The state of softmax attention, which grows, has a new one for each token."""

    def __init__(self, state: ModelState):
        now = as_packed(state)
        self.grows = any(isinstance(block.attention, KVCache) for block in now.blocks)
        self.position = int(now.position)
        self.last_tokens = now.last_tokens
        self._blocks = now.blocks if self.grows else _copied(now.blocks)
        self._next = _after(self._blocks)
        self._fields = _fields(self._blocks), _fields(self._next)

    @property
    def fields(self) -> tuple[array, array]:
        """The addresses of the buffer that a step reads, and of the one that it writes."""
        return self._fields

    def turn(self, token: int, full: bool) -> None:
        """Take what a step has written for the state after a token; `full` says that a list of recent values may be."""
        self.position += 1
        if self.last_tokens is not None:
            self.last_tokens = torch.cat([self.last_tokens[:, 1:], self.last_tokens.new_tensor([[token]])], dim=1)
        if self.grows or (full and any(map(_is_full, self._next))):
            self._blocks = tuple(with_room(block, full and _is_full(block)) for block in self._next)
            self._next = _after(self._blocks)
            self._fields = _fields(self._blocks), _fields(self._next)
        else:
            self._blocks, self._next = self._next, self._blocks
            self._fields = self._fields[::-1]

    def state(self) -> ModelState:
        return ModelState(_copied(self._blocks), torch.tensor([self.position]), None, self.last_tokens)


class NativeRowStep:
    """Rows by native code."""

    def __init__(self, native: NativeStep):
        self._native = native

    def admit(self, state: ModelState) -> NativeRow:
        return NativeRow(state)

    def __call__(self, rows: Sequence[NativeRow], tokens: Tensor) -> Tensor:
        last = [row.last_tokens for row in rows if row.last_tokens is not None]
        past = torch.cat(last) if last else None
        unread = None if past is None else torch.empty_like(past)  # rows keep their last tokens themselves
        before = step.States(_joined([row.fields[0] for row in rows]), None, past)
        after = step.States(_joined([row.fields[1] for row in rows]), None, unread)
        positions = torch.tensor([row.position for row in rows])
        logits, full = self._native.run(tokens.long().contiguous(), positions, before, after, separate=True)
        for row, token in zip(rows, tokens.tolist(), strict=True):
            row.turn(token, full)
        return logits


class TorchRow:
    """A row of the batch that stepped last."""

    def __init__(self, state: ModelState):
        self.batch, self.place = state, 0

    def state(self) -> ModelState:
        one = state_row(self.batch, self.place)
        return rebuild_state(one, iter([x.clone() for x in state_tensors(one)]))


class TorchRowStep:
    """Rows by torch, as one batch."""

    def __init__(self, model: LanguageModel):
        self._model = model
        self._stepped: list[TorchRow] = []

    def admit(self, state: ModelState) -> TorchRow:
        return TorchRow(state)

    @torch.inference_mode()
    def __call__(self, rows: Sequence[TorchRow], tokens: Tensor) -> Tensor:
        same = len(rows) == len(self._stepped) and all(map(lambda one, other: one is other, rows, self._stepped))
        batch = rows[0].batch if same else concat_states([state_row(row.batch, row.place) for row in rows])
        logits, state = self._model.step(tokens, batch)
        for place, row in enumerate(rows):
            row.batch, row.place = state, place
        self._stepped = list(rows)
        return logits


def _copied(blocks: tuple[BlockState, ...]) -> tuple[BlockState, ...]:
    """Return the states with memory of their own, but for tables that no step writes to."""
    return tuple(map(_copied_block, blocks))


def _after(blocks: tuple[BlockState, ...]) -> tuple[BlockState, ...]:
    return tuple(empty_after(block, None) for block in blocks)


def _copied_block(block: BlockState) -> BlockState:
    tail = None if block.tail is None else block.tail.clone()
    if isinstance(block.attention, NgramState):
        return BlockState(NgramState(*block.attention[:5], *map(torch.clone, block.attention[5:])), tail)
    return BlockState(rebuild_state(block.attention, map(torch.clone, state_tensors(block.attention))), tail)


def _fields(blocks: tuple[BlockState, ...]) -> array:
    return step.layer_states(map(layer_fields, blocks))


def _joined(fields: Sequence[array]) -> array:
    joined = array("q")
    joined.frombytes(b"".join(fields))
    return joined


def _is_full(block: BlockState) -> bool:
    state = block.attention
    return isinstance(state, NgramState) and bool((state.recent_ngram[..., 0] != NO_NGRAM).any())
