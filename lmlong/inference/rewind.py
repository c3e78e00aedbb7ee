"""Stepping back in a text that is being generated, to the session of exactly the printed text."""

import codecs
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

from lmlong.data.tokenizers.base import LOSSLESS, Tokenizer
from lmlong.data.tokenizers.boundaries import settled
from lmlong.inference.session import Session, advance
from lmlong.inference.unread import UnreadText
from lmlong.model.language_model import LanguageModel


class Rewind:
    """An earlier session and the tokens since. Only two sessions are kept, for a text of any length."""

    def __init__(self, tokenizer: Tokenizer, session: Session):
        self._tokenizer = tokenizer
        self._given = session
        self._early = self._late = session
        self._tokens: list[tuple[int, bool]] = []  # since `early`, and whether they are learned from
        self._since = self._size = 0  # tokens and bytes after `late`

    def add(self, tokens: Sequence[int], learn: bool, session: Callable[[], Session], held: str = "") -> None:
        """Add tokens, and whether a state that learns from its text learns from them; with a function that returns the
        session after them, and their text that may be taken back."""
        self._tokens.extend((token, learn) for token in tokens)
        self._since += len(tokens)
        for token in tokens:
            self._size += int(self._tokenizer.token_bytes[token])
        if self._size >= reach(self._tokenizer) + 4 * len(held):
            self._early, self._late = self._late, session()
            self._tokens = self._tokens[-self._since :]
            self._since = self._size = 0

    def session(self, model: LanguageModel, dropped: int) -> Session:
        """Return the session of the text without its last `dropped` characters."""
        tokens = [token for token, _ in self._tokens]
        given = self._given.unread if self._early is self._given else UnreadText()
        read, unread = ending(self._tokenizer, tokens, dropped, given)
        early = self._early._replace(unread=UnreadText())
        return advance(model, early, self._tokens[:read])._replace(unread=unread)


def ending(tokenizer: Tokenizer, tokens: Sequence[int], dropped: int, given: UnreadText) -> tuple[int, UnreadText]:
    """Return where a text ends without its last `dropped` characters: how many of its tokens are read, and the unread
    text after them. It began with `given` unread text, which stays if nothing follows it."""
    data = tokenizer.decode_bytes(tokens)
    data = _without_last(data, dropped) if dropped else data
    if len(data) <= len(given.pending):
        return 0, given
    ends = [0, *accumulate(int(tokenizer.token_bytes[token]) for token in tokens)]
    whole = bisect_right(ends, len(data)) - 1
    read = _count_read(tokenizer, data, ends[: whole + 1])
    chosen = tuple(tokens[read:whole]) if ends[whole] == len(data) else ()
    return read, UnreadText(b"", data[ends[read] :], chosen)


def reach(tokenizer: Tokenizer) -> int:
    """Return the bytes at the end of a text before which more text can no longer change the tokens."""
    return 4 * tokenizer.boundaries.longest


def long_ending(tokenizer: Tokenizer, tokens: Sequence[int], dropped: int, given: UnreadText) -> tuple[int, UnreadText]:
    """Return the `ending` of a text of any length, of which only the last tokens can change."""
    past, size = len(tokens), 0
    while past and size < reach(tokenizer) + 4 * dropped:
        past -= 1
        size += int(tokenizer.token_bytes[tokens[past]])
    read, unread = ending(tokenizer, tokens[past:], dropped, UnreadText() if past else given)
    return past + read, unread


def _count_read(tokenizer: Tokenizer, data: bytes, ends: list[int]) -> int:
    """Return how many of the tokens ending at these bytes stay the same whatever text follows."""
    for end in ends:
        try:
            text = data[end:].decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            continue  # it begins within a character
        covers = tokenizer.boundaries.covers(text)
        stays = tokenizer.decode_bytes(covers[0].tokens[: settled(covers)])
        return bisect_right(ends, end + len(stays)) - 1
    return len(ends) - 1


def _without_last(data: bytes, dropped: int) -> bytes:
    """Return bytes without their last `dropped` characters."""
    decoder = codecs.getincrementaldecoder("utf-8")(LOSSLESS)
    ends = [end for end, byte in enumerate(data, 1) for _ in decoder.decode(bytes([byte]))]
    return data[: ends[-dropped - 1]] if dropped < len(ends) else b""
