"""A cache of the states after prompt prefixes, so that the same tokens are not read twice.

A state of constant size can be kept after any token, not only after whole blocks. It is found by the tokens that it has
read and by whether it learns from them.
"""

import hashlib
from array import array
from bisect import insort
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

from lmlong.inference.awake import AwakeSessions
from lmlong.inference.session import Session
from lmlong.model.state import state_bytes


class Prefix(NamedTuple):
    """A prompt prefix, identified by the digest of its tokens."""

    learn: bool  # whether the state learns
    tokens: int
    digest: bytes


class PrefixCache:
    """The most recently used sessions, of up to `memory` bytes."""

    def __init__(self, memory: int):
        self._sessions = AwakeSessions[Prefix](memory)
        self._lengths: dict[bool, list[int]] = {False: [], True: []}  # of the prefixes by learning, sorted

    def longest(self, tokens: Sequence[int], learn: bool = False) -> Session | None:
        """Return the session that has read the longest prefix of these tokens, and learns from them or not."""
        lengths = takewhile(lambda length: length <= len(tokens), self._lengths[learn])
        cached = [prefix for prefix in _prefixes(learn, tokens, lengths) if prefix in self._sessions]
        return self._sessions.get(cached[-1]) if cached else None

    def keep(self, tokens: Sequence[int], session: Session) -> None:
        """Cache the session after these tokens."""
        (prefix,) = _prefixes(session.state.learned is not None, tokens, [len(tokens)])
        if self._sessions.get(prefix) or state_bytes(session) > self._sessions.memory:
            return
        insort(self._lengths[prefix.learn], prefix.tokens)
        for evicted, _ in self._sessions.put(prefix, session):
            self._lengths[evicted.learn].remove(evicted.tokens)

    @property
    def bytes(self) -> int:
        return self._sessions.bytes

    def __len__(self) -> int:
        return len(self._sessions)


def _prefixes(learn: bool, tokens: Sequence[int], lengths: Sequence[int] | Iterator[int]) -> Iterator[Prefix]:
    """Iterate over the prefixes of these lengths, which are sorted."""
    digest, done = hashlib.blake2b(digest_size=24), 0
    for length in lengths:
        digest.update(array("q", tokens[done:length]).tobytes())
        done = length
        yield Prefix(learn, length, digest.digest())
