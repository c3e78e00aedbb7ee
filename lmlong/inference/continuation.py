"""The text that continues another, from its tokens to its end."""

from collections.abc import Sequence
from typing import Literal

from lmlong.data.tokenizers.base import Tokenizer

End = Literal["eos", "stop", "max_tokens"]


class Continuation:
    """The new text of one row. It ends with the document, before a stop string, or after `max_tokens` tokens."""

    def __init__(self, tokenizer: Tokenizer, max_tokens: int | None, stop: Sequence[str] = ()):
        self._text, self._eos, self._max_tokens = StreamedText(tokenizer, stop), tokenizer.eos, max_tokens
        self.head = b""
        """The bytes with which the next token must begin: the rest of the prompt, for the first one."""
        self.stopping = False
        """Whether to end after the next token."""
        self.written = 0
        """Number of tokens, without the one that ended the text."""
        self.end: End | None = "max_tokens" if max_tokens == 0 else None
        self.tokens: list[int] = []
        """Tokens that were taken with their log-probabilities: a text may be endless."""
        self.log_probabilities: list[float] = []

    def take(self, token: int, log_probability: float | None = None) -> str:
        """Append a token, and return the text that is now final. With its log-probability, keep both."""
        if token == self._eos:
            self.end = "eos"
            return self._text.finish()
        piece = self._text.feed(token, len(self.head))
        self.head, self.written = b"", self.written + 1
        if log_probability is not None:
            self.tokens.append(token)
            self.log_probabilities.append(log_probability)
        if self._text.stopped:
            self.end = "stop"
        elif self.stopping or self.written == self._max_tokens:
            self.end = "max_tokens"
            piece += self._text.finish()
        return piece

    @property
    def held(self) -> str:
        """The end of the text that may be the beginning of a stop string."""
        return self._text.held

    @property
    def dropped(self) -> int:
        """Number of characters at the end of the tokens' text, from the stop string on, that are not part of it."""
        return self._text.dropped


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
