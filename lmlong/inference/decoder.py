"""Texts that are continued token by token, with the state after them.

B rows, V vocabulary.
"""

import torch
from torch import Tensor

from lmlong.inference.drafts import Drafts
from lmlong.inference.session import Session, after_tokens
from lmlong.model.language_model import LanguageModel
from lmlong.model.learning.read import step, step_learned, will_learn
from lmlong.model.learning.state import will_learn_token
from lmlong.model.native_step import NativeStep
from lmlong.model.row_step import NativeRowStep, Pass
from lmlong.model.sampling_options import RECENT


class Decoder:
    """The texts of a session's rows. Tensors of their tokens are made only when a session is asked for: they would take
    a good part of a small model's time."""

    def __init__(self, model: LanguageModel, session: Session):
        self._model, self._session = model, session
        self._state, self._last = session.state, session.last
        self._after = self._state  # after the last token
        self._since: list[Tensor] = []  # tokens (B,) after the session

    @torch.inference_mode()
    def next_logits(self) -> Tensor:
        """Return the logits (B, V) of the next token of each row."""
        logits, self._after = step(self._model, self._last, self._state)
        return logits

    def append(self, token: Tensor) -> None:
        """Append the token (B,) that was drawn from the last logits."""
        self._state, self._last = will_learn(self._after, False), token
        self._since.append(token)
        if len(self._since) == RECENT:
            self.session()

    @torch.inference_mode()
    def session(self) -> Session:
        """Return the session after all tokens so far."""
        if self._since:
            self._session = after_tokens(self._session, torch.stack(self._since, dim=1), self._state)
            self._since = []
        return self._session


class NativeDecoder:
    """One text that native code continues, in passes over a token and a draft of the next ones."""

    def __init__(self, model: LanguageModel, session: Session, drafts: Drafts | None):
        assert can_draft(model, session) and isinstance(model.fast_step, NativeStep)
        self._model, self._session, self._drafts = model, session, drafts
        self._steps = NativeRowStep(model, model.fast_step)
        self._row = self._steps.admit(session.state)
        self._last = int(session.last)
        self._since: list[int] = []  # tokens after the session
        self._pass: Pass | None = None
        self._read = 0  # tokens of the pass that the text has read
        self._learned = session.state.learned  # after the last token

    @torch.inference_mode()
    def next_logits(self) -> Tensor:
        """Return the logits (1, V) of the next token."""
        read, now = self._read, self._pass
        if now is None and self._drafts:
            self._drafts.begin(self._session)
        if now is not None and read < len(now.tokens) and now.tokens[read] == self._last:
            assert self._drafts
            self._drafts.counts.accepted += 1
        else:
            if now is not None:
                self._row.advance(now.tokens[:read])
            read = self._read = 0
            draft = self._drafts.next() if self._drafts else []
            now = self._pass = self._steps.ahead(self._row, [self._last, *draft])
        logits = now.logits[read : read + 1]
        if self._row.learned is None:
            return logits
        token, position = torch.tensor([self._last]), torch.tensor([self._row.position + read])
        hidden = now.hidden[read : read + 1]
        logits, self._learned = step_learned(self._model, token, hidden, logits, position, self._row.learned)
        return logits

    def append(self, token: Tensor) -> None:
        """Append the token (1,) that was drawn from the last logits."""
        self._last = int(token)
        self._since.append(self._last)
        self._read += 1
        if self._learned is not None:
            self._row.learned = will_learn_token(self._learned, False)
        if self._drafts:
            self._drafts.append(self._last)
        if len(self._since) == RECENT:
            self.session()

    @torch.inference_mode()
    def session(self) -> Session:
        """Return the session after all tokens so far."""
        if self._since:
            assert self._pass is not None
            state = self._row.state(self._pass.tokens[: self._read])
            self._session = after_tokens(self._session, torch.tensor([self._since]), state)
            self._since = []
        return self._session


def can_draft(model: LanguageModel, session: Session) -> bool:
    """Return whether native code can continue a session in passes: it is one text, and no layers are downsampled."""
    return isinstance(model.fast_step, NativeStep) and model.hourglass is None and len(session.last) == 1


def drafts_for(model: LanguageModel, session: Session) -> Drafts | None:
    """Return the drafts of a generation, or None if a pass cannot read several of its tokens."""
    return Drafts() if can_draft(model, session) else None


def decoder(model: LanguageModel, session: Session, drafts: Drafts | None) -> Decoder | NativeDecoder:
    """Return the decoder of a session. `drafts` are used if native code can read them."""
    return NativeDecoder(model, session, drafts) if can_draft(model, session) else Decoder(model, session)
