"""One request in the engine: its prompt is read in pieces, then its text is generated token by token."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from lmlong.inference.generation import End, StreamedText
from lmlong.inference.healing import heal
from lmlong.inference.loading import TrainedLanguageModel
from lmlong.inference.rewind import long_ending
from lmlong.inference.sampling import Sampler
from lmlong.inference.session import NO_TOKEN, Session, begin_learning, even_pieces, with_unread
from lmlong.inference.state_table import PIECE, Kind, Piece, Place, StateTable, pieces_of, superseded
from lmlong.inference.unread import Encoding, UnreadText
from lmlong.model.row_step import Row, RowStep
from lmlong.model.sampling_options import RECENT, Sampling
from lmlong.serving.reading import ReadingProgress
from lmlong.serving.request import Event, Request, TokenLikelihood, Turn, WrittenToken

Deliver = Callable[[Event], None]


class Writer:
    """A running request; `deliver` is called with each event, in the engine's thread."""

    def __init__(self, trained: TrainedLanguageModel, request: Request, deliver: Deliver, states: StateTable):
        self.request, self.cancelled, self.ended = request, False, False
        self.sampler = Sampler(request.sampling, [request.draws], trained.tokenizer.eos)
        self.head = b""
        """The bytes with which the next token must begin: the rest of the prompt, for the first one."""
        self.stopping = False
        """Whether to end after the next token."""
        self.last = 0
        """The last token, which the next step reads."""
        self.row: Row
        self.cached_tokens = 0
        """Tokens of the prompt whose state was known."""
        self._trained, self._deliver, self._states = trained, deliver, states
        self._text = StreamedText(trained.tokenizer, request.stop)
        self._written = self.prompt_tokens = 0
        self._recent: deque[int] = deque(maxlen=RECENT)
        self._place = request.start or Place(states.empty)
        self._prompt: list[Piece] = []  # what the request has read
        self._kept: dict[int, bytes] = {}  # the keys of the states kept on the way, by their tokens
        self._unread = UnreadText()
        self._healed: list[int] = []  # tokens of the unread text
        self._noted: list[int] = []  # and those after them

    def read(self) -> Iterator[None]:
        """Read the prompt; iterate over its pieces, for other work in between."""
        start, tokenizer, prompt = self._place.session, self._trained.tokenizer, self.request.prompt
        unread = start.unread.row(0) if start else UnreadText()
        encoding = Encoding(tokenizer, unread, [prompt if isinstance(prompt, str) else ""], heal=True)
        parts: Iterable[Sequence[int]] = [prompt]  # type: ignore[list-item]
        if isinstance(prompt, str):
            parts = chain([] if start else [[tokenizer.bos]], encoding)
        known: list[int] = []
        if start is None:
            tokens = list[int]()
            for part in parts:
                tokens.extend(part)
                yield
            pieces = pieces_of(self._kind, tokens)
            self._place, number = self._states.nearest(self._place, pieces)
            self._prompt = pieces[:number]
            known, parts = tokens[: number * PIECE], [tokens[number * PIECE :]]
            self.cached_tokens = max(0, len(known) - self._begins_with_bos)
        progress = None
        if self.request.reports and isinstance(prompt, str):
            progress = ReadingProgress(prompt, tokenizer.token_bytes, known)
            parts = progress.counted(parts)
        before = self._place.tokens
        for part in even_pieces(parts, PIECE):
            piece = Piece(self._kind, tuple(part))
            self._place = self._place.after(self._trained.model, [piece])
            self._prompt.append(piece)
            self._keep()
            if progress and (report := progress.after(self._place.tokens - before)):
                self._deliver(Event(progress=report))
            yield
        self._unread = encoding.unread

    def _keep(self) -> None:
        """Keep the state after the prompt so far, and those at doubling distances before it."""
        self._states.put(self._place)
        end = self._place.tokens
        self._kept[end] = self._place.key
        for position in superseded(self._kept, end):
            self._states.forget(self._kept.pop(position))

    @property
    def _kind(self) -> Kind:
        """The kind of the pieces of the prompt."""
        return "learn" if self.request.learn else "read"

    def begin(self, steps: RowStep) -> None:
        """Read the rest of the prompt, and join the batch."""
        session, tokenizer = self._place.session, self._trained.tokenizer
        assert session is not None
        session = with_unread(begin_learning(self._trained.model, session, self.request.learn), self._unread)
        if self.request.max_tokens == 0:
            self._count_prompt(session)
            self._end("max_tokens", "")
            return
        if self._unread.pending:
            healed = heal(self._trained.model, tokenizer, session, self.sampler, 0)
            session, self.head = healed.session, healed.cover.head
            self._healed = healed.cover.tokens
        self._count_prompt(session)
        self._recent.extend(token for token in session.recent[0].tolist() if token != NO_TOKEN)
        self.last, self.row = int(session.last), steps.admit(session.state)

    def _count_prompt(self, session: Session) -> None:
        before = self.request.start.tokens if self.request.start else 0
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
        if self._text.stopped:
            self._end("stop", piece, likelihoods)
        elif self.stopping or self._written == self.request.max_tokens:
            self._end("max_tokens", piece + self._text.finish(), likelihoods)
        elif piece or likelihoods:
            self._deliver(Event(piece, likelihoods))

    def _note(self, token: int) -> None:
        """Note a token as the last one, which the row has not read."""
        self.head, self.last = b"", token
        self._noted.append(token)
        self._recent.append(token)

    def fail(self, error: BaseException) -> None:
        """End by an error."""
        self.ended = True
        self._deliver(Event(error=error))

    def _end(self, how: End, piece: str, likelihoods: WrittenToken | None = None) -> None:
        self.ended = True
        turn = self._turn() if self.request.keep_session else None
        counts = self.prompt_tokens, self.cached_tokens, self._written
        self._deliver(Event(piece, likelihoods, how, None, turn, *counts))

    def _turn(self) -> Turn:
        """Return what the request adds to its session."""
        read, unread, options = 0, self._unread, dict[str, Any]()
        if self._written:
            tokens = [*self._healed, *self._noted]
            if tokens[-1] == self._trained.tokenizer.eos:
                tokens.pop()
            read, unread = long_ending(self._trained.tokenizer, tokens, self._text.dropped, unread)
        if self.request.max_tokens:
            given, default = asdict(self.request.sampling), asdict(Sampling())
            options = {name: value for name, value in given.items() if value != default[name]}
            options |= {"max_tokens": self.request.max_tokens, "stop": self.request.stop}
        healed = pieces_of("wrote" if self._unread.chosen else self._kind, self._healed[:read])
        written = pieces_of("wrote", self._noted[: max(0, read - len(self._healed))])
        return Turn(self._place, tuple(self._prompt), (*healed, *written), unread, self.request.learn, options)

    @property
    def last_tokens(self) -> Tensor:
        """The last tokens (1, RECENT), after NO_TOKEN if they are fewer."""
        return torch.tensor([[*[NO_TOKEN] * (RECENT - len(self._recent)), *self._recent]])

    def _likelihoods(self, token: int, log_probabilities: Tensor) -> WrittenToken:
        values, tokens = log_probabilities.topk(min(self.request.alternatives or 0, len(log_probabilities)))
        likeliest = map(TokenLikelihood, tokens.tolist(), values.tolist())
        return WrittenToken(token, float(log_probabilities[token]), tuple(likeliest))
