"""Streaming generation: from sampled tokens to characters, and to text up to a stop string."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Literal

import torch
from torch import Tensor

from lmlong.data.tokenizers.base import Tokenizer
from lmlong.errors import UsageError
from lmlong.inference.decoder import Decoder
from lmlong.inference.drafts import Drafts
from lmlong.inference.healing import heal, only_beginning_with
from lmlong.inference.rewind import Rewind
from lmlong.inference.sampling import Sampler
from lmlong.inference.session import Session, logits_not_finite
from lmlong.model.finite import NotFinite
from lmlong.model.language_model import LanguageModel
from lmlong.model.state import concat_states, state_row

End = Literal["eos", "stop", "max_tokens"]


@dataclass
class Continuation:
    """The new text of one row so far."""

    text: "StreamedText"
    written: int = 0  # tokens, without the one that ended the text
    end: End | None = None
    tokens: list[int] = field(default_factory=list)  # kept only on request, since generation may be endless
    log_probabilities: list[float] = field(default_factory=list)  # of each token, before any sampling option


class Generation:
    """The continuations of all rows of a session in parallel, as a stream of pieces of text."""

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer,
        session: Session,
        sampler: Sampler,
        max_tokens: int | None,
        stop: Sequence[str] = (),
        keep: bool = False,
        drafts: Drafts | None = None,
    ):
        check_end(max_tokens, stop)
        self.model, self.tokenizer, self.sampler = model, tokenizer, sampler
        self.max_tokens, self.keep, self.drafts = max_tokens, keep, drafts
        self._decoder = Decoder(model, session, drafts)
        self.rows = [Continuation(StreamedText(tokenizer, stop)) for _ in session.last]
        self._rewind = Rewind(tokenizer, session) if len(self.rows) == 1 else None

    def __iter__(self) -> Iterator[tuple[int, str]]:
        """Iterate over (row, piece of text) until every row has ended."""
        rows, eos = self.rows, self.tokenizer.eos
        for step in count() if self.max_tokens is None else range(self.max_tokens):
            writing = [number for number, row in enumerate(rows) if row.end is None]
            if not writing:
                break
            heads = self._heal() if step == 0 else None
            logits = self._decoder.next_logits()
            allowed = only_beginning_with(self.tokenizer, heads, logits) if heads else logits
            recent = self.session.recent if self.sampler.needs_recent else None
            try:
                sampled = self.sampler(allowed, recent).to(logits.device)
            except NotFinite:
                raise logits_not_finite(self.model, self.session.recent) from None
            tokens = sampled.tolist()
            log_probs = _log_probabilities(logits, sampled).tolist() if self.keep else None
            if any(tokens[number] != eos for number in writing):
                self._decoder.append(tokens)
            for number in writing:
                given, log_prob = len(heads[number]) if heads else 0, log_probs[number] if log_probs else 0.0
                if piece := self._take(rows[number], tokens[number], log_prob, given):
                    yield number, piece
        for number, row in enumerate(rows):
            if row.end is None:
                row.end = "max_tokens"
                if piece := row.text.finish():
                    yield number, piece

    @property
    def session(self) -> Session:
        """The session after all tokens so far."""
        return self._decoder.session()

    def finished(self) -> Session:
        """Return the session of a single row after exactly the text that was printed."""
        assert self._rewind is not None, "several rows"
        return self._rewind.session(self.model, self.rows[0].text.dropped)

    def _heal(self) -> list[bytes]:
        """Read the unread text of each row up to where its next token begins; return the rest, with which that token
        must begin."""
        session = self.session
        if not session.unread.pending.shape[1]:
            return [b""] * len(self.rows)
        rows = [state_row(session, row) for row in range(len(self.rows))]
        starts = [heal(self.model, self.tokenizer, row, self.sampler, number) for number, row in enumerate(rows)]
        healed = concat_states([start.session for start in starts])
        self._decoder = Decoder(self.model, healed, self.drafts)
        if self._rewind:
            self._rewind.add(starts[0].cover.tokens, True, lambda: healed)
        return [start.cover.head for start in starts]

    def _take(self, row: Continuation, token: int, log_probability: float, given: int) -> str:
        """Append a token to a row, and return the text that is now final. The token's first `given` bytes belong to the
        prompt."""
        if token == self.tokenizer.eos:
            row.end = "eos"
            return row.text.finish()
        row.written += 1
        if self.keep:
            row.tokens.append(token)
            row.log_probabilities.append(log_probability)
        piece = row.text.feed(token, given)
        if self._rewind:
            self._rewind.add([token], False, lambda: self.session, row.text.held)
        if row.text.stopped:
            row.end = "stop"
        return piece


def check_end(max_tokens: int | None, stop: Sequence[str]) -> None:
    """Refuse an invalid number of tokens or invalid stop strings."""
    if max_tokens is not None and max_tokens < 0:
        raise UsageError(f"max_tokens: {max_tokens} is negative. Give a number of tokens, or None for no end.")
    if isinstance(stop, str):
        raise UsageError(f"stop: {stop!r} is one string. Give a list of strings.")
    if "" in stop:
        raise UsageError("stop: an empty string is everywhere. Name the strings to stop at.")


@torch.inference_mode()
def _log_probabilities(logits: Tensor, tokens: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]


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
