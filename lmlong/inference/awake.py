"""A cache in memory of the sessions used last; all sessions are in files."""

from collections import OrderedDict

from lmlong.inference.session import Session
from lmlong.model.state import state_bytes


class AwakeSessions:
    """Sessions by name, of up to `memory` bytes together, but one at least."""

    def __init__(self, memory: int):
        self.memory, self.bytes = memory, 0
        self._sessions: OrderedDict[str, Session] = OrderedDict()  # the latest used last

    def __len__(self) -> int:
        return len(self._sessions)

    def items(self) -> list[tuple[str, Session]]:
        """Return the sessions with their names, that used longest ago first."""
        return list(self._sessions.items())

    def get(self, name: str) -> Session | None:
        """Return a session, which is the latest used now; None where it is not awake."""
        if name in self._sessions:
            self._sessions.move_to_end(name)
        return self._sessions.get(name)

    def put(self, name: str, session: Session) -> list[tuple[str, Session]]:
        """Keep a session, and return those that no longer fit into memory, used longest ago first."""
        self.pop(name)
        self._sessions[name] = session
        self.bytes += state_bytes(session)
        tired = []
        while self.bytes > self.memory and len(self._sessions) > 1:
            tired.append(self.pop_oldest())
        return tired

    def pop_oldest(self) -> tuple[str, Session]:
        """Return the session used longest ago, with its name, and let go of it."""
        name, session = self._sessions.popitem(last=False)
        self.bytes -= state_bytes(session)
        return name, session

    def pop(self, name: str) -> Session | None:
        """Return a session, and let go of it."""
        session = self._sessions.pop(name, None)
        if session is not None:
            self.bytes -= state_bytes(session)
        return session
