"""Rows: texts that an engine continues, each from a session to its own end.

A turn gives each of some rows its next token: the engine reads the last one, the row's sampler draws from the logits,
and the text grows. A row's text does not depend on the rows beside it.

B rows, V vocabulary.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import isfinite
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from lmlong.data.tokenizers.base import Tokenizer
from lmlong.decode.engine import Engine, Pass, learned_logits
from lmlong.inference.drafts import Drafts
from lmlong.inference.healing import heal, only_beginning_with
from lmlong.inference.rewind import Rewind
from lmlong.inference.sampling import Sampler, sample
from lmlong.inference.session import Session, logits_not_finite
from lmlong.inference.streamed_text import StreamedText
from lmlong.model.learning.state import Learned, will_learn_token
from lmlong.model.sampling_options import RECENT, Sampling

End = Literal["eos", "stop", "max_tokens"]
Value = TypeVar("Value")


class Row:
    """A text that an engine continues, until the document ends, before a stop string or after `max_tokens` tokens."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        session: Session,
        options: Sampling,
        numbers: Sequence[int] = (0,),
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        keeps_tokens: bool = False,
        keeps_state: bool = True,
        drafts: Drafts | None = None,
        rewind: Rewind | None = None,
    ):
        """Continue a session; its unread text becomes the beginning of the next token.

        `numbers` seed the draws, together with the seed. `keeps_state` is needed for `session`; without it, a CUDA
        graph does not copy the state before each token. `drafts` are used while the row is alone. `rewind` is needed
        for `finished`.
        """
        self.tokenizer, self.drafts = tokenizer, drafts
        self.sampler = Sampler(options, numbers, tokenizer.eos)
        self.end: End | None = "max_tokens" if max_tokens == 0 else None
        self.written = 0
        """Number of new tokens, without the one that ended the document."""
        self.tokens: list[int] = []
        """The new tokens, if they are kept: a text may be endless."""
        self.healed: list[int] = []
        """The tokens of the unread text, before the new ones."""
        self.head = b""
        """The bytes with which the next token must begin: the rest of the prompt, for the first one."""
        self.keeps_state, self._keeps_tokens, self._max_tokens = keeps_state, keeps_tokens, max_tokens
        self._text, self._rewind = StreamedText(tokenizer, stop), rewind
        if self.end is None and session.unread.pending:
            session = self._heal(engine, session)
        self._start, self._engine = session, engine
        self.total = session.total
        """Number of tokens, including the prompt's."""
        self.last_tokens = deque(session.recent, RECENT)
        self.last = session.last
        """The last token, which is not read yet."""
        self.at: Any = None if self.end else engine.load(session.state)
        """The engine's row. It moves past its last pass when the next one begins."""
        self.last_pass: Pass | None = None
        self.read = 0
        """Number of tokens of the last pass that are part of the text."""
        self.learned: Learned | None = None
        """What is learned after the next of them."""
        if drafts:
            drafts.begin([*self.last_tokens])

    def _heal(self, engine: Engine, session: Session) -> Session:
        """Return the session up to where the next token begins."""
        _, session, cover = heal(engine.model, self.tokenizer, session, self.sampler)
        self.healed, self.head = cover.tokens, cover.head
        if self._rewind:
            self._rewind.add(cover.tokens, True, lambda: session)
        return session

    @torch.inference_mode()
    def session(self) -> Session:
        """Return the session after all tokens so far."""
        assert self.keeps_state
        if not self.written:
            return self._start
        return Session(self._engine.save(self.at, self.read), tuple(self.last_tokens), self.total)

    def finished(self) -> Session:
        """Return the session after exactly the text so far, which may end within a token."""
        assert self._rewind is not None
        return self._rewind.session(self._engine.model, self.dropped)

    @property
    def dropped(self) -> int:
        """Number of characters at the end of the tokens' text, from the stop string on, that are not part of it."""
        return self._text.dropped

    @property
    def follows_draft(self) -> bool:
        """Whether the last pass has read the last token too."""
        known = self.last_pass.tokens[0] if self.last_pass else []
        return self.read < len(known) and known[self.read] == self.last

    def take(self, token: int) -> str:
        """Append a token, and return the text that is now final."""
        if token == self.tokenizer.eos:
            self.end = "eos"
            return self._text.finish()
        self._append(token)
        text = self._text.feed(token, len(self.head))
        self.head, self.written = b"", self.written + 1
        if self._keeps_tokens:
            self.tokens.append(token)
        if self._text.stopped:
            self.end = "stop"
        elif self.written == self._max_tokens:
            text += self.finish()
        if self._rewind:
            self._rewind.add([token], False, self.session, self._text.held)
        return text

    def finish(self) -> str:
        """End the text here, and return the rest of it."""
        self.end = "max_tokens"
        return self._text.finish()

    def _append(self, token: int) -> None:
        self.last, self.total = token, self.total + 1
        self.last_tokens.append(token)
        if self.keeps_state:
            self.read += 1
            self.at.learned = None if self.learned is None else will_learn_token(self.learned, False)
        if self.drafts:
            self.drafts.append(token)


class Prediction(NamedTuple):
    """What the model predicts for the next token of a row."""

    logits: Tensor  # (1, V)
    is_finite: bool  # also those of tokens that may not follow


class Drawn(NamedTuple):
    """What a turn adds to a row."""

    text: str
    """Text that is now final."""
    token: int | None
    predicted: Prediction | None
    error: BaseException | None
    """Why the row cannot be continued."""


@torch.inference_mode()
def advance(engine: Engine, rows: Sequence[Row]) -> list[Drawn]:
    """Draw the next token of each row. All or no rows keep their states. An error of one does not affect the others."""
    errors: dict[Row, BaseException] = {}
    predicted = _apart(rows, partial(_predict, engine), errors)
    tokens = dict[Row, int]()
    for group in _with_same_options(predicted):
        tokens |= _apart(group, partial(_draw, engine, predicted), errors)
    texts = dict[Row, str]()
    for row in tokens:
        texts |= _apart([row], partial(_take, tokens), errors)
    return [Drawn(texts.get(row, ""), tokens.get(row), predicted.get(row), errors.get(row)) for row in rows]


def _apart(
    rows: Sequence[Row], call: Callable[[Sequence[Row]], Iterable[Value]], errors: dict[Row, BaseException]
) -> dict[Row, Value]:
    """Return the values of a call with all rows. If it raises, it is called with each row, so that only those that
    cause an error have one."""
    try:
        return dict(zip(rows, call(rows), strict=True))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a panic of Rust is no Exception
        if len(rows) == 1:
            errors[rows[0]] = error
            return {}
    return {row: value for one in rows for row, value in _apart([one], call, errors).items()}


def _predict(engine: Engine, rows: Sequence[Row]) -> list[Prediction]:
    """Return the predictions for the next token of each row."""
    logits = _next_logits(engine, rows)
    return list(map(Prediction, logits.split(1), map(isfinite, logits.amax(-1).tolist())))


def _next_logits(engine: Engine, rows: Sequence[Row]) -> Tensor:
    """Return the logits (B, V) of the next token of each row. A row that is alone may have them from a draft."""
    drafts = rows[0].drafts if len(rows) == 1 else None
    if drafts and rows[0].follows_draft:
        drafts.counts.accepted += 1
    elif not rows[0].keeps_state:
        return engine.step([row.at for row in rows], [row.last for row in rows])
    else:
        for row in rows:
            engine.advance(row.at, row.read)
            row.read = 0
        draft = drafts.next() if drafts else []
        read = engine.read([row.at for row in rows], [[row.last, *draft] for row in rows])
        for row in rows:
            row.last_pass = read
    now = rows[0].last_pass
    assert now is not None
    logits, learned = learned_logits(engine.model, [row.at for row in rows], now, rows[0].read)
    for row, after in zip(rows, learned, strict=True):
        row.learned = after
    return logits


def _draw(engine: Engine, predicted: Mapping[Row, Prediction], rows: Sequence[Row]) -> list[int]:
    """Return the next tokens of rows with the same options."""
    if not all(predicted[row].is_finite for row in rows):
        raise logits_not_finite(engine.model, rows[0].last_tokens)
    each = [predicted[row].logits for row in rows]
    together = torch.cat(each) if len(each) > 1 else each[0]
    allowed = only_beginning_with(rows[0].tokenizer, [row.head for row in rows], together)
    return sample([row.sampler for row in rows], allowed, [row.last_tokens for row in rows])


def _take(tokens: Mapping[Row, int], rows: Sequence[Row]) -> list[str]:
    return [row.take(tokens[row]) for row in rows]


def _with_same_options(rows: Iterable[Row]) -> Iterable[list[Row]]:
    """Divide rows into groups that are drawn together."""
    groups: dict[Sampling, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.sampler.distribution, []).append(row)
    return groups.values()
