"""The tokens at the end of a text that more text could change.

A tokenizer merges across cuts: "of " followed by "the" has other tokens than "of the". If a text is continued, at most
one piece crosses its end. Such a piece begins with the last characters of the text, so it has only a few possible
starts, and the tokens before a start are the tokens of the text up to it. This holds for BPE and for unigram models. A
pre-tokenizer's cut may depend on the next character: two line ends are one piece at the end of a text, and two pieces
before a word. So the text up to a start is encoded with its next character, and the whole text with one character of
each class.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np


class Cover(NamedTuple):
    """One possible tokenization across the end of a text."""

    tokens: list[int]  # that end within the text
    head: bytes  # the rest of the text, with which the next piece begins; may be empty


class TokenBoundaries:
    """The pieces of a tokenizer, sorted, to find those with a given prefix."""

    def __init__(self, table: Sequence[bytes], encode_part: Callable[[str], list[int]], followers: Sequence[str] = ()):
        pieces = sorted((data, token) for token, data in enumerate(table) if len(data) > 1)
        self._encode_part = encode_part
        self._sizes = [len(data) for data in table]
        self._followers = followers  # one character of each class that affects the cut before it
        self._pieces = [data for data, _ in pieces]
        self._tokens = np.array([token for _, token in pieces], dtype=np.int64)
        self.longest = max(map(len, self._pieces), default=1)
        """The size of the longest piece in bytes; if it is 1, no text changes the tokens before it."""

    def tokens_beginning_with(self, head: bytes) -> np.ndarray:
        """Return the ids of all pieces that are longer than `head` and begin with it."""
        first = bisect_right(self._pieces, head)
        return self._tokens[first : bisect_left(self._pieces, head + b"\xff", lo=first)]  # no UTF-8 has this byte

    def covers(self, part: str) -> list[Cover]:
        """Return every possible tokenization across the end of a part, by the start of the piece that crosses it."""
        whole = [self._encode_part(part)]
        for follower in self._followers:
            whole += self._before(part, follower)
        covers = [Cover(list(tokens), b"") for tokens in dict.fromkeys(map(tuple, whole))]
        head = b""
        for start in range(len(part) - 1, -1, -1):
            head = part[start].encode("utf-8", "surrogatepass") + head
            if len(head) >= self.longest:
                break
            if len(self.tokens_beginning_with(head)):
                following = part[start] if self._followers else ""
                covers += [Cover(tokens, head) for tokens in self._before(part[:start], following)]
        return covers

    def _before(self, part: str, following: str) -> list[list[int]]:
        """Return the possible tokens of a part that is followed by `following`, if none of them crosses its end."""
        tokens, left = self._encode_part(part + following), len(part.encode("utf-8", "surrogatepass"))
        for number, token in enumerate(tokens):
            if left == 0:
                return [tokens[:number]]
            if left < self._sizes[token]:  # crosses the end, where a longer token with the same beginning could start
                possible = [self._encode_part(part)]
                if (rest := part.encode("utf-8", "surrogatepass")[-left:]).isspace():  # cut from the spaces before it
                    possible.append(tokens[:number] + self._encode_part(rest.decode()))
                return possible
            left -= self._sizes[token]
        return [tokens if left == 0 else self._encode_part(part)]


def settled(covers: Sequence[Cover]) -> int:
    """Return the number of leading tokens of a part that no following text changes."""
    shortest = min(len(cover.tokens) for cover in covers)
    return next((n for n in range(shortest) if len({cover.tokens[n] for cover in covers}) > 1), shortest)
