"""States after the beginnings of texts, so that what was read once is not read again.

A state of constant size can be kept after any token, not after whole blocks alone. It is found by the tokens that it
has read and by who asked: what one key has sent is never of use to another, not even to find out that it was sent.
"""

import hashlib
from array import array
from bisect import insort
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

from lmlong.inference.session import Session
from lmlong.model.state import state_bytes


class Prefix(NamedTuple):
    """The beginning of a text, by the digest of its tokens."""

    owner: str
    tokens: int
    digest: bytes


class PrefixCache:
    """The latest used states, up to so many bytes."""

    def __init__(self, memory: int):
        self.memory, self.bytes = memory, 0
        self._sessions: OrderedDict[Prefix, Session] = OrderedDict()  # the latest used last
        self._lengths: dict[str, list[int]] = {}  # of the prefixes of each owner, sorted

    def longest(self, owner: str, tokens: Sequence[int]) -> Session | None:
        """Return the session that has read the most of the beginning of these tokens."""
        lengths = takewhile(lambda length: length <= len(tokens), self._lengths.get(owner, []))
        cached = [prefix for prefix in _prefixes(owner, tokens, lengths) if prefix in self._sessions]
        if not cached:
            return None
        self._sessions.move_to_end(cached[-1])
        return self._sessions[cached[-1]]

    def keep(self, owner: str, tokens: Sequence[int], session: Session) -> None:
        """Keep the session that has read these tokens, up to the last, which comes next."""
        size = state_bytes(session.state)
        (prefix,) = _prefixes(owner, tokens, [len(tokens)])
        if prefix in self._sessions:
            self._sessions.move_to_end(prefix)
            return
        if size > self.memory:
            return
        self._sessions[prefix] = session
        self.bytes += size
        insort(self._lengths.setdefault(owner, []), prefix.tokens)
        while self.bytes > self.memory:
            self._forget(next(iter(self._sessions)))

    def __len__(self) -> int:
        return len(self._sessions)

    def _forget(self, prefix: Prefix) -> None:
        self.bytes -= state_bytes(self._sessions.pop(prefix).state)
        lengths = self._lengths[prefix.owner]
        lengths.remove(prefix.tokens)
        if not lengths:
            del self._lengths[prefix.owner]


def _prefixes(owner: str, tokens: Sequence[int], lengths: Sequence[int] | Iterator[int]) -> Iterator[Prefix]:
    """Iterate over the beginnings of tokens of these lengths, from the shortest on."""
    digest, done = hashlib.blake2b(digest_size=24), 0
    for length in lengths:
        digest.update(array("q", tokens[done:length]).tobytes())
        done = length
        yield Prefix(owner, length, digest.digest())
