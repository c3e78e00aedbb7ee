"""One request in the engine: its prompt is read in pieces, then its text is generated token by token."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor

from lmlong.inference.generation import End, StreamedText
from lmlong.inference.healing import heal
from lmlong.inference.loading import TrainedLanguageModel
from lmlong.inference.rewind import Rewind
from lmlong.inference.sampling import Sampler
from lmlong.inference.session import NO_TOKEN, Session, begin_learning, prefill_pieces, with_unread
from lmlong.inference.unread import Encoding, UnreadText, as_tensors
from lmlong.model.row_step import Row, RowStep
from lmlong.model.sampling_options import RECENT
from lmlong.serving.prefix_cache import PrefixCache
from lmlong.serving.reading import ReadingProgress
from lmlong.serving.request import Event, Request, TokenLikelihood, WrittenToken

Deliver = Callable[[Event], None]

KEPT_EVERY, KEPT_AT_MOST = 4096, 1 << 20
"""Tokens of a long prompt between two cached states, and the longest text whose last state is cached."""


class Writer:
    """A running request; `deliver` is called with each event, in the engine's thread."""

    def __init__(
        self, trained: TrainedLanguageModel, request: Request, deliver: Deliver, cache: PrefixCache | None = None
    ):
        self.request, self.cancelled, self.ended = request, False, False
        self.sampler = Sampler(request.sampling, [request.draws], trained.tokenizer.eos)
        self.head = b""
        """The bytes with which the next token must begin: the rest of the prompt, for the first one."""
        self.last = 0
        """The last token, which the next step reads."""
        self.row: Row
        self.cached_tokens = 0
        """Tokens of the prompt that were in the cache."""
        self._trained, self._deliver = trained, deliver
        self._cache = None if request.start else cache  # the tokens of a session are not known
        self._tokens: list[int] = []  # all so far, where there is a cache
        self._text = StreamedText(trained.tokenizer, request.stop)
        self._written = self._noted = self.prompt_tokens = 0
        self._recent: deque[int] = deque(maxlen=RECENT)
        self._rewind: Rewind | None = None
        self._session: Session | None = None

    def read(self, piece: int) -> Iterator[None]:
        """Read the prompt; iterate over its pieces, for other work in between."""
        start, tokenizer, prompt = self.request.start, self._trained.tokenizer, self.request.prompt
        unread = start.unread.row(0) if start else UnreadText()
        encoding = Encoding(tokenizer, unread, [prompt if isinstance(prompt, str) else ""], heal=True)
        pieces: Iterable[Sequence[int]] = [prompt]  # type: ignore[list-item]
        if isinstance(prompt, str):
            pieces = chain([] if start else [[tokenizer.bos]], encoding)
        if start:
            self._session = begin_learning(self._trained.model, with_unread(start, UnreadText()), self.request.learn)
        if self._cache is not None:
            for tokens in pieces:
                self._tokens.extend(tokens)
                yield
            self._session = self._cache.longest(self._tokens, self.request.learn)
            cached = int(self._session.total) if self._session else 0
            self.cached_tokens = max(0, cached - self._begins_with_bos)
            pieces = [self._tokens[cached:]]
        progress = None
        if self.request.reports and isinstance(prompt, str):
            known = self._tokens[: int(self._session.total)] if self._cache and self._session else []
            progress = ReadingProgress(prompt, tokenizer.token_bytes, known)
            pieces = progress.counted(pieces)
        before = int(self._session.total) if self._session else 0
        for session in prefill_pieces(self._trained.model, pieces, self._session, piece, self.request.learn):
            self._session = session
            self._keep(every=KEPT_EVERY, new=piece)
            if progress and (report := progress.after(int(session.total) - before)):
                self._deliver(Event(progress=report))
            yield
        assert self._session is not None
        self._keep()
        self._session = with_unread(self._session, encoding.unread)

    def _keep(self, every: int = 1, new: int = 1) -> None:
        """Cache the state if one of the last `new` tokens has a number divisible by `every`."""
        if self._cache is not None and self._session is not None:
            read = int(self._session.total)
            if read >= every and read % every < new:
                self._cache.keep(self._tokens[:read], self._session)

    def begin(self, steps: RowStep) -> None:
        """Read the rest of the prompt, and join the batch."""
        session, tokenizer = self._session, self._trained.tokenizer
        assert session is not None
        if self.request.max_tokens == 0:
            self._count_prompt(session)
            self._end("max_tokens", "")
            return
        if self.request.keep_session:
            self._rewind = Rewind(tokenizer, session)
        if session.unread.pending.shape[1]:
            healed = heal(self._trained.model, tokenizer, session, self.sampler, 0)
            session, self.head = healed.session, healed.cover.head
            self._tokens.extend(healed.cover.tokens)
            if self._rewind:
                self._rewind.add(healed.cover.tokens, True, lambda: healed.session)
        self._count_prompt(session)
        self._recent.extend(token for token in session.recent[0].tolist() if token != NO_TOKEN)
        self.last, self.row, self._session = int(session.last), steps.admit(session.state), session

    def _count_prompt(self, session: Session) -> None:
        before = int(self.request.start.total) if self.request.start else 0
        self.prompt_tokens = int(session.total) - before - self._begins_with_bos

    @property
    def _begins_with_bos(self) -> bool:
        """Whether bos was read before the prompt."""
        return self.request.start is None and isinstance(self.request.prompt, str)

    @property
    def recent(self) -> Tensor | None:
        """The last tokens (1, RECENT), if the sampler needs them."""
        return self.last_tokens if self.sampler.needs_recent else None

    def take(self, token: int, log_probabilities: Tensor | None) -> None:
        """Append a sampled token, and deliver the text that is final."""
        likelihoods = None if log_probabilities is None else self._likelihoods(token, log_probabilities)
        if token == self._trained.tokenizer.eos:
            self._note(token)  # a conversation may continue after it
            self._end("eos", self._text.finish(), likelihoods)
            return
        piece = self._text.feed(token, len(self.head))
        self._note(token)
        self._written += 1
        if self._rewind:
            self._rewind.add([token], False, self._now, self._text.held)
        if self._text.stopped:
            self._end("stop", piece, likelihoods)
        elif self._written == self.request.max_tokens:
            self._end("max_tokens", piece + self._text.finish(), likelihoods)
        elif piece or likelihoods:
            self._deliver(Event(piece, likelihoods))

    def _note(self, token: int) -> None:
        """Note a token as the last one, which the row has not read."""
        self.head, self.last = b"", token
        self._noted += 1
        self._recent.append(token)
        if self._cache is not None:
            self._tokens.append(token)

    def fail(self, error: BaseException) -> None:
        """End by an error."""
        self.ended = True
        self._deliver(Event(error=error))

    def _end(self, how: End, piece: str, likelihoods: WrittenToken | None = None) -> None:
        self.ended = True
        as_prompt = not self.request.learn  # as a prompt would be read
        if self._cache is not None and as_prompt and self._written and len(self._tokens) <= KEPT_AT_MOST:
            self._cache.keep(self._tokens, self._now())
        session = self._session if self.request.keep_session else None
        if self._rewind:
            session = self._rewind.session(self._trained.model, self._text.dropped)
        counts = self.prompt_tokens, self.cached_tokens, self._written
        self._deliver(Event(piece, likelihoods, how, None, session, *counts))

    def _now(self) -> Session:
        """Return the session after the tokens so far, the last of which the row has not read."""
        assert self._session is not None
        device = self._session.last.device
        recent = self.last_tokens.to(device)
        total = self._session.total + self._noted
        unread = as_tensors(UnreadText(), device)
        return Session(self.row.state(), torch.tensor([self.last], device=device), recent, total, unread)

    @property
    def last_tokens(self) -> Tensor:
        """The last tokens (1, RECENT), after NO_TOKEN if they are fewer."""
        return torch.tensor([[*[NO_TOKEN] * (RECENT - len(self._recent)), *self._recent]])

    def _likelihoods(self, token: int, log_probabilities: Tensor) -> WrittenToken:
        values, tokens = log_probabilities.topk(min(self.request.alternatives or 0, len(log_probabilities)))
        likeliest = map(TokenLikelihood, tokens.tolist(), values.tolist())
        return WrittenToken(token, float(log_probabilities[token]), tuple(likeliest))
