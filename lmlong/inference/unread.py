"""Unread text: the end of a text whose tokens depend on what follows, kept as text in a session."""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import NamedTuple

from lmlong.data.tokenizers.base import Tokenizer, parts
from lmlong.data.tokenizers.boundaries import settled

LONG = 512
"""Limit of unread bytes, and of chosen tokens. Beyond it, settled tokens are read even if no text follows, and chosen
tokens are read in one pass; usually a few dozen bytes are unread."""


class UnreadText(NamedTuple):
    """Unread text."""

    before: bytes = b""  # text already read that is encoded together with `pending`
    pending: bytes = b""  # the unread text
    chosen: tuple[int, ...] = ()  # the tokens of `pending` if the model generated them; kept if nothing follows

    def text(self) -> str:
        """Return the part of the text that ends with the unread text."""
        return (self.before + self.pending).decode("utf-8", "surrogatepass")


class Encoding:
    """The tokens of unread text and the text after it, in pieces.

    With `heal`, the last tokens, which more text could change, are omitted and become the new `unread` once all others
    are taken.
    """

    def __init__(self, tokenizer: Tokenizer, unread: UnreadText, text: str | Iterable[str], heal: bool):
        self.unread = unread
        pieces = [text] if isinstance(text, str) else text
        self._tokenizer, self._text = tokenizer, map(tokenizer.representable, pieces)
        self._heal = heal and tokenizer.boundaries.longest > 1

    def __iter__(self) -> Iterator[list[int]]:
        pieces = iter(self._text)
        following = next(filter(None, pieces), None)
        stays_unread = self._heal and len(self.unread.pending) <= LONG
        if following is None and (stays_unread or self.unread.chosen):
            if not self._heal:
                yield list(self.unread.chosen)
                self.unread = UnreadText()
            return
        read = len(self.unread.before)
        last = None
        for part in parts(chain([self.unread.text(), following or ""], pieces)):
            if last is not None:
                yield tokens_after(self._tokenizer, read, self._tokenizer.encode_part(last))
                read = 0
            last = part
        yield self._end(last or "", read)

    def _end(self, part: str, read: int) -> list[int]:
        """Return the tokens of the last part that are read now; the rest becomes the unread text."""
        if not self._heal:
            self.unread = UnreadText()
            return tokens_after(self._tokenizer, read, self._tokenizer.encode_part(part))
        covers = self._tokenizer.boundaries.covers(part)
        tokens = covers[0].tokens[: settled(covers)]
        before = self._tokenizer.decode_bytes(tokens)
        self.unread = UnreadText(before, part.encode("utf-8", "surrogatepass")[len(before) :])
        return tokens_after(self._tokenizer, read, tokens)


def tokens_after(tokenizer: Tokenizer, size: int, tokens: list[int]) -> list[int]:
    """Return the tokens after the first `size` bytes of a text."""
    for number, token in enumerate(tokens):
        if size <= 0:
            return tokens[number:]
        size -= int(tokenizer.token_bytes[token])
    return []
