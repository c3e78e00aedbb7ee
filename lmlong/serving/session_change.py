"""Sessions from the event loop: their files are read and written in a thread beside it, and one request at a time works
on each."""

from collections.abc import Callable
from typing import Any, TypeVar

from lmlong.errors import CheckpointError, LmlongError
from lmlong.inference.session import Session
from lmlong.serving.api_errors import ApiError
from lmlong.serving.aside import Worker
from lmlong.serving.engine import Closed
from lmlong.serving.sessions import NoState, QuotaReached, SessionInfo, SessionStore, UnknownSession

Result = TypeVar("Result")


class Sessions:
    """The sessions of a server."""

    def __init__(self, store: SessionStore, most_waiting: int, owners: int = 1):
        self.store = store
        self.worker = Worker("lmlong-sessions", most_waiting, owners)
        self._in_use: set[str] = set()

    async def run(self, call: Callable[..., Result], owner: str, *what: Any) -> Result:
        """Return what a method of the store gives an owner, beside the event loop; its refusals as an ApiError."""
        try:
            return await self.worker.run(lambda _: call(owner, *what), owner)
        except UnknownSession as error:
            raise _not_found(error) from None
        except QuotaReached as error:
            raise ApiError(429, str(error), "session", "insufficient_quota") from None
        except NoState as error:
            raise ApiError(400, str(error), code="invalid_state") from None
        except Closed:
            raise
        except CheckpointError:
            raise ApiError(410, "The file of this session is damaged.", "session", "session_damaged") from None
        except LmlongError:
            raise ApiError(507, "The server's disk does not take the session.", code="insufficient_storage") from None

    def change(self, owner: str, name: str | None) -> "Change":
        """Return a session that is to be changed, or a new one, where no other request works on it."""
        if name is not None:
            try:
                self.store.info(owner, name)
            except UnknownSession as error:
                raise _not_found(error) from None
            if name in self._in_use:
                message = "Another request works on this session. Wait until it ends, or fork the session."
                raise ApiError(409, message, "session", "session_in_use")
            self._in_use.add(name)
        return Change(self, owner, name)

    def release(self, name: str) -> None:
        self._in_use.discard(name)


def _not_found(error: UnknownSession) -> ApiError:
    return ApiError(404, str(error), "session", "session_not_found")


class Change:
    """A session while one request works on it; a new one has no name yet."""

    def __init__(self, sessions: Sessions, owner: str, name: str | None):
        self._sessions, self._owner, self._name = sessions, owner, name
        self._is_held = name is not None

    async def start(self) -> Session | None:
        """Return what was read so far."""
        return await self._sessions.run(self._sessions.store.get, self._owner, self._name) if self._name else None

    async def save(self, session: Session) -> SessionInfo:
        """Keep what it has become."""
        store = self._sessions.store
        if self._name is None:
            return await self._sessions.run(store.create, self._owner, session)
        return await self._sessions.run(store.update, self._owner, self._name, session)

    def release(self) -> None:
        """Let others work on it; only the first call does anything, for another request may hold it by the next."""
        if self._is_held and self._name is not None:
            self._is_held = False
            self._sessions.release(self._name)
