"""A cache of the states after prompt prefixes, so that the same tokens are not read twice.

A state of constant size can be kept after any token, not only after whole blocks. It is found by the tokens that it has
read, by whether it learns from them and by the owner of the request: no key can use, or detect, what another key has
sent.
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

    owner: str
    learn: bool  # whether the state learns
    tokens: int
    digest: bytes


class PrefixCache:
    """The most recently used sessions, of up to `memory` bytes."""

    def __init__(self, memory: int):
        self._sessions = AwakeSessions[Prefix](memory)
        self._lengths: dict[tuple[str, bool], list[int]] = {}  # of the prefixes by owner and learning, sorted

    def longest(self, owner: str, tokens: Sequence[int], learn: bool = False) -> Session | None:
        """Return the session that has read the longest prefix of these tokens, and learns from them or not."""
        lengths = takewhile(lambda length: length <= len(tokens), self._lengths.get((owner, learn), []))
        cached = [prefix for prefix in _prefixes(owner, learn, tokens, lengths) if prefix in self._sessions]
        return self._sessions.get(cached[-1]) if cached else None

    def keep(self, owner: str, tokens: Sequence[int], session: Session) -> None:
        """Cache the session after these tokens."""
        (prefix,) = _prefixes(owner, session.state.learned is not None, tokens, [len(tokens)])
        if self._sessions.get(prefix) or state_bytes(session) > self._sessions.memory:
            return
        insort(self._lengths.setdefault(prefix[:2], []), prefix.tokens)
        for evicted, _ in self._sessions.put(prefix, session):
            lengths = self._lengths[evicted[:2]]
            lengths.remove(evicted.tokens)
            if not lengths:
                del self._lengths[evicted[:2]]

    @property
    def bytes(self) -> int:
        return self._sessions.bytes

    def __len__(self) -> int:
        return len(self._sessions)


def _prefixes(
    owner: str, learn: bool, tokens: Sequence[int], lengths: Sequence[int] | Iterator[int]
) -> Iterator[Prefix]:
    """Iterate over the prefixes of these lengths, which are sorted."""
    digest, done = hashlib.blake2b(digest_size=24), 0
    for length in lengths:
        digest.update(array("q", tokens[done:length]).tobytes())
        done = length
        yield Prefix(owner, learn, length, digest.digest())
