"""One request in the scheduler: its prompt is read in pieces, then its text is generated token by token."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import chain
from typing import Any

from torch import Tensor

from lmlong.decode.engine import Engine
from lmlong.inference.loading import TrainedLanguageModel
from lmlong.inference.rewind import long_ending
from lmlong.inference.row import Drawn, Row
from lmlong.inference.session import begin_learning, even_pieces
from lmlong.inference.state_table import PIECE, Kind, Piece, Place, StateTable, pieces_of, superseded
from lmlong.inference.unread import Encoding, UnreadText
from lmlong.model.sampling_options import MAX_TOKENS, Sampling
from lmlong.serving.request import Event, ReadingProgress, Request, TokenLikelihood, Turn, WrittenToken

Deliver = Callable[[Event], None]


class Writer:
    """A running request; `deliver` is called with each event, in the scheduler's thread."""

    def __init__(self, trained: TrainedLanguageModel, request: Request, deliver: Deliver, states: StateTable):
        self.request, self.cancelled, self.ended = request, False, False
        self.stopping = False
        """Whether to end after the next token."""
        self.row: Row | None = None
        """The text, once the prompt is read."""
        self.cached_tokens = 0
        """Tokens of the prompt whose state was known."""
        self._trained, self._deliver, self._states = trained, deliver, states
        self.prompt_tokens = 0
        self._place = request.start or Place(states.empty)
        self._begins_with_bos = request.start is None and isinstance(request.prompt, str)
        self._kind: Kind = "learn" if request.learn else "read"
        self._prompt: list[Piece] = []  # what the request has read
        self._kept: dict[int, bytes] = {}  # the keys of the states kept on the way, by their tokens
        self._unread = UnreadText()

    def read(self) -> Iterator[None]:
        """Read the prompt; iterate over its pieces, for other work in between."""
        start, tokenizer, prompt = self._place.session, self._trained.tokenizer, self.request.prompt
        unread = start.unread if start else UnreadText()
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
        for part in even_pieces(parts, PIECE):
            piece = Piece(self._kind, tuple(part))
            self._place = self._place.after(self._trained.model, [piece])
            self._prompt.append(piece)
            self._keep()
            if progress and (report := progress.after(part)):
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

    def begin(self, engine: Engine) -> None:
        """Read the rest of the prompt, and join the batch."""
        request, session = self.request, self._place.session
        assert session is not None
        session = begin_learning(self._trained.model, session, request.learn)._replace(unread=self._unread)
        how = request.sampling, request.draws, request.max_tokens, request.stop
        tokenizer, keeps = self._trained.tokenizer, request.keep_session
        self.row = Row(engine, tokenizer, session, *how, keeps_tokens=keeps, keeps_state=not engine.copies_states)
        before = request.start.tokens if request.start else 0
        self.prompt_tokens = self.row.total - before - self._begins_with_bos
        if self.row.end:
            self._end(self.row, "")

    def take(self, drawn: Drawn) -> None:
        """Deliver what a turn adds to the text."""
        row, (text, token, logits, error) = self.row, drawn
        assert row is not None
        if error is not None:
            raise error
        if self.stopping and not row.end:
            text += row.finish()
        alternatives, written = self.request.alternatives, None
        if alternatives is not None and logits is not None and token is not None:
            written = written_token(token, logits[0].double().log_softmax(-1), alternatives)
        if row.end:
            self._end(row, text, written)
        elif text or written:
            self._deliver(Event(text, written))

    def fail(self, error: BaseException) -> None:
        """End by an error."""
        self.ended = True
        self._deliver(Event(error=error))

    def _end(self, row: Row, text: str, token: WrittenToken | None = None) -> None:
        self.ended = True
        turn = self._turn(row) if self.request.keep_session else None
        counts = self.prompt_tokens, self.cached_tokens, row.written
        self._deliver(Event(text, token, row.end, None, turn, *counts))

    def _turn(self, row: Row) -> Turn:
        """Return what the request adds to its session."""
        read, unread, options = 0, self._unread, dict[str, Any]()
        if row.written:
            tokens = [*row.healed, *row.tokens]
            read, unread = long_ending(self._trained.tokenizer, tokens, row.dropped, unread)
        if self.request.max_tokens:
            given = {**asdict(self.request.sampling), "max_tokens": self.request.max_tokens, "stop": self.request.stop}
            default = {**asdict(Sampling()), "max_tokens": MAX_TOKENS, "stop": ()}
            options = {name: value for name, value in given.items() if value != default[name]}
        healed = pieces_of("wrote" if self._unread.chosen else self._kind, row.healed[:read])
        written = pieces_of("wrote", row.tokens[: max(0, read - len(row.healed))])
        return Turn(self._place, tuple(self._prompt), (*healed, *written), unread, self.request.learn, options)


def written_token(token: int, log_probabilities: Tensor, alternatives: int) -> WrittenToken:
    """Return a token with its log-probability, of all (V,), and the most likely ones in its place."""
    values, likeliest = log_probabilities.topk(min(alternatives, len(log_probabilities)))
    others = tuple(map(TokenLikelihood, likeliest.tolist(), values.tolist()))
    return WrittenToken(token, float(log_probabilities[token]), others)
