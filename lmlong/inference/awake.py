"""An in-memory LRU cache of sessions; all sessions are also in files."""

from collections import OrderedDict

from lmlong.inference.session import Session
from lmlong.model.state import state_bytes


class AwakeSessions:
    """Sessions by name, of up to `memory` bytes in total, but always at least one."""

    def __init__(self, memory: int):
        self.memory, self.bytes = memory, 0
        self._sessions: OrderedDict[str, Session] = OrderedDict()  # most recently used last

    def __len__(self) -> int:
        return len(self._sessions)

    def items(self) -> list[tuple[str, Session]]:
        """Return the sessions with their names, least recently used first."""
        return list(self._sessions.items())

    def get(self, name: str) -> Session | None:
        """Return a session and mark it as most recently used; None if it is not in the cache."""
        if name in self._sessions:
            self._sessions.move_to_end(name)
        return self._sessions.get(name)

    def put(self, name: str, session: Session) -> list[tuple[str, Session]]:
        """Add a session; return the sessions evicted for it, least recently used first."""
        self.pop(name)
        self._sessions[name] = session
        self.bytes += state_bytes(session)
        evicted = []
        while self.bytes > self.memory and len(self._sessions) > 1:
            evicted.append(self.pop_oldest())
        return evicted

    def pop_oldest(self) -> tuple[str, Session]:
        """Remove the least recently used session and return it with its name."""
        name, session = self._sessions.popitem(last=False)
        self.bytes -= state_bytes(session)
        return name, session

    def pop(self, name: str) -> Session | None:
        """Remove a session and return it; None if it is not in the cache."""
        session = self._sessions.pop(name, None)
        if session is not None:
            self.bytes -= state_bytes(session)
        return session
