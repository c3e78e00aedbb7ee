"""Streaming generation: the continuations of sessions, piece by piece."""

from collections.abc import Iterator, Sequence

from lmlong.data.tokenizers.base import Tokenizer
from lmlong.decode.engine import engine_of
from lmlong.errors import UsageError
from lmlong.inference.drafts import Drafts
from lmlong.inference.rewind import Rewind
from lmlong.inference.row import Row, advance
from lmlong.inference.session import Session
from lmlong.model.language_model import LanguageModel
from lmlong.model.sampling_options import Sampling


class Generation:
    """The continuations of one or more sessions in parallel, as a stream of pieces of text."""

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer,
        sessions: Session | Sequence[Session],
        options: Sampling,
        numbers: Sequence[Sequence[int]] = ((0,),),
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        keep: bool = False,
        drafts: Drafts | None = None,
    ):
        """`numbers` seed the draws of each row. With `keep`, tokens and their log-probabilities are kept. `drafts` are
        used if there is one session, and a pass can read several of its tokens."""
        check_end(max_tokens, stop)
        engine, alone = engine_of(model), len(numbers) == 1
        sessions = [sessions] if isinstance(sessions, Session) else sessions
        self.drafts = drafts if alone and engine.reads_ahead else None
        self.rows = [
            Row(
                engine,
                tokenizer,
                session,
                options,
                each,
                max_tokens,
                stop,
                keeps_tokens=keep,
                drafts=self.drafts,
                rewind=Rewind(tokenizer, session) if alone else None,
            )
            for session, each in zip(sessions, numbers, strict=True)
        ]
        self.log_probabilities: list[list[float]] = [[] for _ in numbers]
        """Those of the tokens of each row, if they are kept."""
        self._engine, self._keep = engine, keep

    def __iter__(self) -> Iterator[tuple[int, str]]:
        """Iterate over (row, piece of text) until every row has ended."""
        while writing := [number for number, row in enumerate(self.rows) if row.end is None]:
            turn = advance(self._engine, [self.rows[number] for number in writing])
            for number, (text, token, logits, error) in zip(writing, turn, strict=True):
                if error is not None:
                    raise error
                if self._keep and logits is not None and self.rows[number].end != "eos":
                    self.log_probabilities[number].append(float(logits.log_softmax(-1)[0, token]))
                if text:
                    yield number, text

    @property
    def session(self) -> Session:
        """The session of a single text after all tokens so far."""
        (row,) = self.rows
        return row.session()

    def finished(self) -> Session:
        """Return the session of a single text after exactly the text that was printed."""
        (row,) = self.rows
        return row.finished()


def check_end(max_tokens: int | None, stop: Sequence[str]) -> None:
    """Refuse an invalid number of tokens or invalid stop strings."""
    if max_tokens is not None and max_tokens < 0:
        raise UsageError(f"max_tokens: {max_tokens} is negative. Give a number of tokens, or None for no end.")
    if isinstance(stop, str):
        raise UsageError(f"stop: {stop!r} is one string. Give a list of strings.")
    if "" in stop:
        raise UsageError("stop: an empty string is everywhere. Name the strings to stop at.")
