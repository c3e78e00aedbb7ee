"""Rows: texts that an engine continues, each from a session to its own end.

A turn gives each of some rows its next token: the engine reads the last one, the row's sampler draws from the logits,
and the text grows. A row's text does not depend on the rows beside it.

B rows, V vocabulary.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from math import isfinite
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lmlong.data.tokenizers.base import Tokenizer
from lmlong.decode.engine import Engine, Pass, learned_logits
from lmlong.inference.drafts import Drafts
from lmlong.inference.healing import heal, only_beginning_with
from lmlong.inference.rewind import Rewind
from lmlong.inference.sampling import Sampler, sample
from lmlong.inference.session import Session, logits_not_finite
from lmlong.model.learning.state import Learned, will_learn_token
from lmlong.model.sampling_options import RECENT, Sampling

End = Literal["eos", "stop", "max_tokens"]


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

        `numbers` seed the draws, together with the seed. `keeps_state` is needed for `session`, and `rewind` for
        `finished`. `drafts` are used while the row is alone.
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

    def begin_pass(self, drafts: Drafts | None) -> list[int]:
        """Move past the tokens of the last pass that are part of the text, and return those to read next."""
        self._engine.advance(self.at, self.read)
        self.read = 0
        return [self.last, *drafts.next()] if drafts else [self.last]

    def take(self, token: int) -> str:
        """Append a token, and return the text that is now final."""
        if token == self.tokenizer.eos:
            self.end = "eos"
            return self._text.finish()
        self.last, self.total = token, self.total + 1
        self.last_tokens.append(token)
        if self.keeps_state:
            self.read += 1
            self.at.learned = None if self.learned is None else will_learn_token(self.learned, False)
        if self.drafts:
            self.drafts.append(token)
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


class StreamedText:
    """Text of streamed tokens, in pieces of whole characters, up to the stop string that is completed first."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()):
        self.stopped = False
        self.dropped = 0  # characters from the stop string on
        self._characters = tokenizer.stream()
        self._stop = stop
        self.held = ""  # may be the beginning of a stop string

    def feed(self, token: int, skip: int = 0) -> str:
        """Append a token without its first `skip` bytes, and return the text that is now final."""
        return self.add(self._characters.feed(token, skip))

    def finish(self) -> str:
        """Return the rest of the text after the last token."""
        piece = self.add(self._characters.finish())
        held, self.held = self.held, ""
        return piece + held

    def add(self, piece: str) -> str:
        """Append characters, and return the text that is now final; the division into pieces makes no difference."""
        if self.stopped:
            return ""
        if not self._stop:
            return piece
        held = self.held + piece
        if ends := [(begin + len(word), begin) for word in self._stop if (begin := held.find(word)) >= 0]:
            self.stopped, self.held, begin = True, "", min(ends)[1]
            self.dropped = len(held) - begin
            return held[:begin]
        ready = len(held) - _unfinished(held, self._stop)
        self.held = held[ready:]
        return held[:ready]


def _unfinished(text: str, stop: Sequence[str]) -> int:
    """Return how many characters at the end of a text may be the beginning of a stop string."""
    lengths = (length for word in stop for length in range(1, len(word)) if text.endswith(word[:length]))
    return max(lengths, default=0)


class Drawn(NamedTuple):
    """What a turn adds to a row."""

    text: str = ""
    """Text that is now final."""
    token: int | None = None
    logits: Tensor | None = None  # (1, V)
    """The model's prediction of the token."""
    error: BaseException | None = None
    """Why the row cannot be continued."""


@torch.inference_mode()
def advance(engine: Engine, rows: Sequence[Row]) -> list[Drawn]:
    """Draw the next token of each row. All or no rows keep their states. An error of one does not affect the others."""
    first, drafts = rows[0], rows[0].drafts if len(rows) == 1 else None
    try:
        if not first.keeps_state:
            logits = engine.step([row.at for row in rows], [row.last for row in rows])
        else:
            if drafts and first.follows_draft:
                drafts.counts.accepted += 1
            else:
                tokens = [row.begin_pass(drafts) for row in rows]
                read = engine.read([row.at for row in rows], tokens)
                for row in rows:
                    row.last_pass = read
            assert first.last_pass is not None
            logits, learned = learned_logits(engine.model, [row.at for row in rows], first.last_pass, first.read)
            for row, after in zip(rows, learned, strict=True):
                row.learned = after
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a panic of Rust is no Exception
        return [Drawn(error=error)] if len(rows) == 1 else [drawn for row in rows for drawn in advance(engine, [row])]
    tokens_or_errors: dict[int, int | BaseException] = {}
    for group in _with_same_options(rows):
        tokens_or_errors |= _draw(engine, rows, logits, group)
    return [_take(row, tokens_or_errors[number], logits[number : number + 1]) for number, row in enumerate(rows)]


def _draw(engine: Engine, rows: Sequence[Row], logits: Tensor, group: Sequence[int]) -> dict[int, int | BaseException]:
    """Return the next tokens of a group of rows with the same options, or why a row has none, by the rows' numbers."""
    chosen = [rows[number] for number in group]
    try:
        together = logits if len(group) == len(rows) else logits[group]
        if not all(map(isfinite, together.amax(-1).tolist())):  # also those of tokens that may not follow
            raise logits_not_finite(engine.model, chosen[0].last_tokens)
        allowed = only_beginning_with(chosen[0].tokenizer, [row.head for row in chosen], together)
        tokens = sample([row.sampler for row in chosen], allowed, [row.last_tokens for row in chosen])
        return dict(zip(group, tokens, strict=True))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if len(group) == 1:
            return {group[0]: error}
    return {one: value for number in group for one, value in _draw(engine, rows, logits, [number]).items()}


def _take(row: Row, token: int | BaseException, logits: Tensor) -> Drawn:
    """Append a token to a row, unless it is an error."""
    if isinstance(token, BaseException):
        return Drawn(logits=logits, error=token)
    try:
        return Drawn(row.take(token), token, logits)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return Drawn("", token, logits, error)


def _with_same_options(rows: Sequence[Row]) -> Iterable[list[int]]:
    """Divide the numbers of rows into groups that are drawn together."""
    if len(rows) == 1:
        return [[0]]
    groups: dict[Sampling, list[int]] = {}
    for number, row in enumerate(rows):
        groups.setdefault(row.sampler.distribution, []).append(number)
    return groups.values()
