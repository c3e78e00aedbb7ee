"""An in-memory LRU cache of sessions; all sessions are also in files."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

from lmlong.inference.session import Session
from lmlong.model.state import state_bytes

Key = TypeVar("Key", bound=Hashable)


class AwakeSessions(Generic[Key]):
    """Sessions by name, of up to `memory` bytes in total, but always at least one."""

    def __init__(self, memory: int):
        self.memory, self.bytes = memory, 0
        self._sessions: OrderedDict[Key, Session] = OrderedDict()  # most recently used last

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, name: Key) -> bool:
        return name in self._sessions

    def items(self) -> list[tuple[Key, Session]]:
        """Return the sessions with their names, least recently used first."""
        return list(self._sessions.items())

    def get(self, name: Key) -> Session | None:
        """Return a session and mark it as most recently used; None if it is not in the cache."""
        if name in self._sessions:
            self._sessions.move_to_end(name)
        return self._sessions.get(name)

    def put(self, name: Key, session: Session) -> list[tuple[Key, Session]]:
        """Add a session; return the sessions evicted for it, least recently used first."""
        self.pop(name)
        self._sessions[name] = session
        self.bytes += state_bytes(session)
        evicted = []
        while self.bytes > self.memory and len(self._sessions) > 1:
            evicted.append(self.pop_oldest())
        return evicted

    def pop_oldest(self) -> tuple[Key, Session]:
        """Remove the least recently used session and return it with its name."""
        name, session = self._sessions.popitem(last=False)
        self.bytes -= state_bytes(session)
        return name, session

    def pop(self, name: Key) -> Session | None:
        """Remove a session and return it; None if it is not in the cache."""
        session = self._sessions.pop(name, None)
        if session is not None:
            self.bytes -= state_bytes(session)
        return session
