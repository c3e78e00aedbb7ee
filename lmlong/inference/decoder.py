"""The texts of a session's rows, which an engine continues token by token.

B rows, V vocabulary.
"""

import torch
from torch import Tensor

from lmlong.decode.engine import Pass, engine_of, learned_logits, rows_of
from lmlong.inference.drafts import Drafts
from lmlong.inference.session import Session, after_tokens
from lmlong.model.language_model import LanguageModel
from lmlong.model.learning.state import Learned, will_learn_token
from lmlong.model.sampling_options import RECENT
from lmlong.model.state import concat_states


class Decoder:
    """Continues a session in passes over the last token of each row, and over a draft of the next ones if there is one
    row. Tensors of tokens are made only when a session is asked for: they would take a good part of a small model's
    time."""

    def __init__(self, model: LanguageModel, session: Session, drafts: Drafts | None = None):
        self._model, self._session, self._engine = model, session, engine_of(model)
        self._rows = rows_of(self._engine, session.state)
        self._drafts = drafts if can_draft(model, session) else None
        self._last: list[int] = session.last.tolist()
        self._since: list[list[int]] = []  # tokens of all rows after the session
        self._pass: Pass | None = None
        self._read = 0  # tokens of the pass that the texts have read
        self._learned: list[Learned | None] = []  # after the last token
        if self._drafts:
            self._drafts.begin(session)

    def next_logits(self) -> Tensor:
        """Return the logits (B, V) of the next token of each row."""
        now = self._pass
        if now is not None and self._read < len(now.tokens[0]) and now.tokens[0][self._read] == self._last[0]:
            assert self._drafts
            self._drafts.counts.accepted += 1
        else:
            for row in self._rows:
                self._engine.advance(row, self._read)
            draft, self._read = self._drafts.next() if self._drafts else [], 0
            now = self._pass = self._engine.read(self._rows, [[token, *draft] for token in self._last])
        logits, self._learned = learned_logits(self._model, self._rows, now, self._read)
        return logits

    def append(self, tokens: list[int]) -> None:
        """Append the token of each row that was drawn from the last logits."""
        self._last = tokens
        self._since.append(tokens)
        self._read += 1
        for row, learned in zip(self._rows, self._learned, strict=True):
            row.learned = learned if learned is None else will_learn_token(learned, False)
        if self._drafts:
            self._drafts.append(tokens[0])
        if len(self._since) == RECENT:
            self.session()

    @torch.inference_mode()
    def session(self) -> Session:
        """Return the session after all tokens so far."""
        if self._since:
            state = concat_states([self._engine.save(row, self._read) for row in self._rows])
            new = self._session.last.new_tensor(self._since)
            self._session, self._since = after_tokens(self._session, new.mT, state), []
        return self._session


def can_draft(model: LanguageModel, session: Session) -> bool:
    """Return whether a pass can read several tokens of a session."""
    return engine_of(model).reads_ahead and len(session.last) == 1


def drafts_for(model: LanguageModel, session: Session) -> Drafts | None:
    """Return the drafts of a generation, or None if a pass cannot read several of its tokens."""
    return Drafts() if can_draft(model, session) else None
