"""An engine continues rows of text with one model. Each row comes with its own state, joins and leaves at any step.

B rows, N tokens of each row, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lmlong.model.language_model import LanguageModel, ModelState
from lmlong.model.learning.read import step_learned
from lmlong.model.learning.state import Learned, will_learn_token
from lmlong.model.state import concat_states, state_row
from lmlong.native.state import map_state


class Pass(NamedTuple):
    """What the model itself predicts after each of some tokens, without what rows learned."""

    tokens: list[list[int]]  # of each row
    logits: Tensor  # (B, N, V)
    hidden: Tensor  # (B, N, width)


class Row:
    """A row of an engine."""

    def __init__(self, state: ModelState):
        self.position = int(state.position)
        """Tokens of the current document so far."""
        self.learned = state.learned
        """What was learned from the text. It is not part of a batch: it is large, and not all rows learn."""


class Engine(ABC):
    """Continues rows with one model, whose weights are final."""

    reads_ahead = False
    """Whether a pass can read several tokens of one row."""
    copies_states = False
    """Whether `read` copies the states before it, and `step` does not."""

    def __init__(self, model: LanguageModel):
        self.model = model

    @property
    def is_stale(self) -> bool:
        """Whether the weights changed after the engine copied them."""
        return False

    def __deepcopy__(self, memo: object) -> None:
        """Return no engine for a copied model, which may get other weights."""
        return None

    @abstractmethod
    def load(self, state: ModelState) -> Any:
        """Return a row that continues the state of one text, which is not modified."""

    @abstractmethod
    def read(self, rows: Sequence[Any], tokens: Sequence[Sequence[int]]) -> Pass:
        """Read the next token of each row, or the next tokens of one row, in one pass over the weights. The rows stay
        where they are until they advance. The pass may end early, before a token for which a state has no room."""

    @abstractmethod
    def advance(self, row: Any, tokens: int) -> None:
        """Move a row past the first `tokens` of its last pass."""

    @abstractmethod
    def save(self, row: Any, tokens: int = 0) -> ModelState:
        """Return the state of a row after the first `tokens` of its last pass. Later passes do not change it."""

    def step(self, rows: Sequence[Any], tokens: Sequence[int], learn_next: bool = False) -> Tensor:
        """Read one more token of each row, and return the logits (B, V) of the next. Rows that learn from their text
        learn from the next token only with `learn_next`. If this raises, all rows are as before."""
        logits, learned = learned_logits(self.model, rows, self.read(rows, [[token] for token in tokens]), 0)
        for row, after in zip(rows, learned, strict=True):
            self.advance(row, 1)
            row.learned = after if after is None else will_learn_token(after, learn_next)
        return logits


def learned_logits(
    model: LanguageModel, rows: Sequence[Any], read: Pass, index: int
) -> tuple[Tensor, list[Learned | None]]:
    """Return the logits (B, V) after the token of each row at an index of a pass, and what is learned after it."""
    logits = read.logits[:, index]
    learned = [row.learned for row in rows]
    for number, row in enumerate(rows):
        if row.learned is not None:
            of_row = slice(number, number + 1)
            token, position = torch.tensor([read.tokens[number][index]]), torch.tensor([row.position + index])
            hidden = read.hidden[of_row, index]
            changed, learned[number] = step_learned(model, token, hidden, logits[of_row], position, row.learned)
            logits = torch.cat([logits[:number], changed, logits[number + 1 :]])
    return logits, learned


class EagerRow(Row):
    """A row, stored as an index into the batch of its last pass."""

    def __init__(self, state: ModelState):
        super().__init__(state)
        self.batch, self.index = state._replace(learned=None), 0
        self.after: ModelState | None = None
        """The batch after the last pass, if the row has not moved there."""


class EagerEngine(Engine):
    """Runs rows by torch, as one batch, which is built again when the rows change."""

    def load(self, state: ModelState) -> EagerRow:
        return EagerRow(state)

    @torch.inference_mode()
    def read(self, rows: Sequence[Any], tokens: Sequence[Sequence[int]]) -> Pass:
        batch = joined(rows)
        token = torch.tensor([token for (token,) in tokens], device=batch.position.device)
        logits, hidden, after = self.model.decode_step(token, batch)
        place(rows, batch, after)
        return Pass([[*row] for row in tokens], logits[:, None], hidden[:, None])

    def advance(self, row: EagerRow, tokens: int) -> None:
        if tokens:
            assert row.after is not None and tokens == 1
            row.batch, row.after, row.position = row.after, None, row.position + 1

    def save(self, row: EagerRow, tokens: int = 0) -> ModelState:
        batch = row.after if tokens else row.batch
        assert batch is not None
        alone = len(batch.position) == 1
        state = batch if alone else map_state(torch.clone, state_row(batch, row.index))  # a view keeps all rows alive
        return state._replace(learned=row.learned)


def joined(rows: Sequence[EagerRow]) -> ModelState:
    """Return the states of rows as one batch."""
    batch = rows[0].batch
    if len(batch.position) == len(rows) and all(row.batch is batch and row.index == n for n, row in enumerate(rows)):
        return batch
    return concat_states([state_row(row.batch, row.index) for row in rows])


def place(rows: Sequence[EagerRow], batch: ModelState, after: ModelState | None = None) -> None:
    """Place rows in a batch, and the pass that they have read in the one `after` it."""
    for index, row in enumerate(rows):
        row.batch, row.index, row.after = batch, index, after


def step(model: LanguageModel, token: Tensor, state: ModelState) -> tuple[Tensor, ModelState]:
    """Return the logits (B, V) of the token after `token` (B,), and the state after it, by the engine of the model."""
    engine = engine_of(model)
    rows = rows_of(engine, state)
    logits = engine.step(rows, token.tolist(), learn_next=True)
    return logits, concat_states([engine.save(row) for row in rows])


def rows_of(engine: Engine, state: ModelState) -> list[Any]:
    """Return the rows of an engine that continue the rows of a state."""
    if len(state.position) == 1:
        return [engine.load(state)]
    return [engine.load(state_row(state, row)) for row in range(len(state.position))]


def engine_of(model: LanguageModel) -> Engine:
    """Return the engine that was chosen for a model, by default torch."""
    return model.engine or EagerEngine(model)
