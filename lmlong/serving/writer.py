"""One request in the engine: its prompt is read piece by piece, then its text is written token by token."""

from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain

import torch
from torch import Tensor

from lmlong.inference.generation import Text
from lmlong.inference.healing import heal
from lmlong.inference.loading import TrainedLanguageModel
from lmlong.inference.rewind import Rewind
from lmlong.inference.sampling import Sampler
from lmlong.inference.session import NO_TOKEN, RECENT, Session, prefill_pieces, with_unread
from lmlong.inference.unread import Encoding, UnreadText, as_tensors
from lmlong.model.rows import Row, RowStep
from lmlong.serving.request import Event, Request, TokenLikelihood, WrittenToken

Deliver = Callable[[Event], None]


class Writer:
    """A request that is read and written; `deliver` is called with each event, from the engine's thread."""

    def __init__(self, trained: TrainedLanguageModel, request: Request, deliver: Deliver):
        self.request, self.cancelled, self.ended = request, False, False
        self.sampler = Sampler(request.sampling, [request.draws])
        self.head = b""
        """What the next token must begin with: the rest of the prompt, for the first one."""
        self.last = 0
        """The last token, which the next step reads."""
        self.row: Row
        self._trained, self._deliver = trained, deliver
        self._text = Text(trained.tokenizer, request.stop)
        self._written = self._prompt_tokens = 0
        self._recent: deque[int] = deque(maxlen=RECENT)
        self._rewind: Rewind | None = None
        self._session: Session | None = None

    def read(self, piece: int) -> Iterator[None]:
        """Read the prompt; iterate over its pieces, for other work in between."""
        start, tokenizer = self.request.start, self._trained.tokenizer
        unread = start.unread.row(0) if start else UnreadText()
        encoding = Encoding(tokenizer, unread, [self.request.prompt], heal=True)
        pieces = chain([] if start else [[tokenizer.bos]], encoding)
        self._session = with_unread(start, UnreadText()) if start else None
        for session in prefill_pieces(self._trained.model, pieces, self._session, piece):
            self._session = session
            yield
        assert self._session is not None
        self._session = with_unread(self._session, encoding.unread)

    def begin(self, steps: RowStep) -> None:
        """Read what the prompt left unread, and join the rows that are written."""
        session, tokenizer = self._session, self._trained.tokenizer
        assert session is not None
        if self.request.keep_session:
            self._rewind = Rewind(tokenizer, session)
        if session.unread.pending.shape[1]:
            found = heal(self._trained.model, tokenizer, session, self.sampler, 0)
            session, self.head = found.session, found.cover.head
            if self._rewind:
                self._rewind.add(found.cover.tokens, lambda: found.session)
        before = int(self.request.start.total) if self.request.start else 1
        self._prompt_tokens = int(session.total) - before
        self._recent.extend(token for token in session.recent[0].tolist() if token != NO_TOKEN)
        self.last, self.row, self._session = int(session.last), steps.admit(session.state), session
        if self.request.max_tokens == 0:
            self._end("max_tokens", "")

    @property
    def recent(self) -> Tensor | None:
        """The last tokens (1, RECENT), where the sampler needs them."""
        return torch.tensor([self._last_tokens()]) if self.sampler.looks_back else None

    def take(self, token: int, log_probabilities: Tensor | None) -> None:
        """Write a token, which was drawn for this row, and tell what is certain of the text."""
        told = None if log_probabilities is None else self._likelihoods(token, log_probabilities)
        if token == self._trained.tokenizer.eos:
            self._end("eos", self._text.finish())
            return
        piece = self._text.feed(token, len(self.head))
        self.head, self.last = b"", token
        self._recent.append(token)
        self._written += 1
        if self._rewind:
            self._rewind.add([token], self._now, self._text.held)
        if self._text.stopped:
            self._end("stop", piece, told)
        elif self._written == self.request.max_tokens:
            self._end("max_tokens", piece + self._text.finish(), told)
        elif piece or told:
            self._deliver(Event(piece, told))

    def fail(self, error: Exception) -> None:
        """End by an error."""
        self.ended = True
        self._deliver(Event(error=error))

    def _end(self, how: str, piece: str, told: WrittenToken | None = None) -> None:
        self.ended = True
        session = self._rewind.session(self._trained.model, self._text.dropped) if self._rewind else None
        self._deliver(Event(piece, told, how, None, session, self._prompt_tokens, self._written))  # type: ignore[arg-type]

    def _now(self) -> Session:
        """Return the session after the tokens so far, the last of which the row has not read."""
        assert self._session is not None
        device = self._session.last.device
        recent = torch.tensor([self._last_tokens()], device=device)
        total = self._session.total + self._written
        unread = as_tensors(UnreadText(), device)
        return Session(self.row.state(), torch.tensor([self.last], device=device), recent, total, unread)

    def _last_tokens(self) -> list[int]:
        return [*[NO_TOKEN] * (RECENT - len(self._recent)), *self._recent]

    def _likelihoods(self, token: int, log_probabilities: Tensor) -> WrittenToken:
        values, tokens = log_probabilities.topk(min(self.request.alternatives or 0, len(log_probabilities)))
        likeliest = map(TokenLikelihood, tokens.tolist(), values.tolist())
        return WrittenToken(token, float(log_probabilities[token]), tuple(likeliest))
