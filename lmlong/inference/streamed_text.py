"""The text of tokens that come one by one, up to a stop string."""

from collections.abc import Sequence

from lmlong.data.tokenizers.base import Tokenizer


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
