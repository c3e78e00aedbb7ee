"""Streaming generation: from sampled tokens to characters, and to text up to a stop string."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Literal

import torch
from torch import Tensor

from lmlong.data.tokenizer import Tokenizer
from lmlong.inference.sampling import Sampler
from lmlong.inference.session import Session, append_token, next_logits
from lmlong.model.language_model import LanguageModel

End = Literal["eos", "stop", "max_tokens"]


@dataclass
class Continuation:
    """The new text of one row so far."""

    text: "Text"
    written: int = 0  # tokens, without the one that ended the text
    end: End | None = None
    tokens: list[int] = field(default_factory=list)  # kept only where asked for, since there may be no end
    log_probabilities: list[float] = field(default_factory=list)  # of each token, before any sampling option


class Generation:
    """The continuations of all rows of a session at the same time, as a stream of pieces of text."""

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer,
        session: Session,
        sampler: Sampler,
        max_tokens: int | None,
        stop: Sequence[str] = (),
        keep: bool = False,
    ):
        self.model, self.sampler, self.max_tokens, self.keep = model, sampler, max_tokens, keep
        self.eos = tokenizer.eos
        self.session = session  # after all tokens so far
        self.rows = [Continuation(Text(tokenizer, stop)) for _ in session.last]

    def __iter__(self) -> Iterator[tuple[int, str]]:
        """Iterate over (row, piece of text) until every row has ended."""
        for _ in count() if self.max_tokens is None else range(self.max_tokens):
            if all(row.end for row in self.rows):
                break
            logits, state = next_logits(self.model, self.session)
            tokens = self.sampler(logits, self.session.recent).to(logits.device)
            probs = _log_probabilities(logits, tokens).tolist() if self.keep else [0.0] * len(tokens)
            going = [row for row, token in zip(self.rows, tokens.tolist(), strict=True) if token != self.eos]
            if any(row.end is None for row in going):
                self.session = append_token(self.session, state, tokens)
            for number, (token, log_probability) in enumerate(zip(tokens.tolist(), probs, strict=True)):
                if self.rows[number].end is None and (piece := self._take(self.rows[number], token, log_probability)):
                    yield number, piece
        for number, row in enumerate(self.rows):
            if row.end is None:
                row.end = "max_tokens"
                if piece := row.text.finish():
                    yield number, piece

    def _take(self, row: Continuation, token: int, log_probability: float) -> str:
        """Append a token to a row, and return the text that is now certain."""
        if token == self.eos:
            row.end = "eos"
            return row.text.finish()
        row.written += 1
        if self.keep:
            row.tokens.append(token)
            row.log_probabilities.append(log_probability)
        piece = row.text.feed(token)
        if row.text.stopped:
            row.end = "stop"
        return piece


@torch.inference_mode()
def _log_probabilities(logits: Tensor, tokens: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]


class Text:
    """Streamed text of tokens, in pieces of whole characters, up to the stop string that is complete first."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()):
        self.stopped = False
        self._characters = tokenizer.stream()
        self._stop = stop
        self._held = ""  # may be the beginning of a stop string

    def feed(self, token: int) -> str:
        return self.add(self._characters.feed(token))

    def finish(self) -> str:
        """Return the rest of the text when no more tokens come."""
        piece = self.add(self._characters.finish())
        held, self._held = self._held, ""
        return piece + held

    def add(self, piece: str) -> str:
        """Append characters, and return the text that is now certain; how they are cut makes no difference."""
        if self.stopped:
            return ""
        held = self._held + piece
        if ends := [(begin + len(word), begin) for word in self._stop if (begin := held.find(word)) >= 0]:
            self.stopped, self._held = True, ""
            return held[: min(ends)[1]]
        ready = len(held) - _unfinished(held, self._stop)
        self._held = held[ready:]
        return held[:ready]


def _unfinished(text: str, stop: Sequence[str]) -> int:
    """Return how many characters at the end of a text may be the beginning of a stop string."""
    lengths = (length for word in stop for length in range(1, len(word)) if text.endswith(word[:length]))
    return max(lengths, default=0)
