"""Sessions from the event loop: their files are read and written in a thread beside it, and one request at a time may
change each of them."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from lmlong.errors import LmlongError
from lmlong.inference.state_table import Place
from lmlong.serving.api_errors import RESPONSES, ApiError
from lmlong.serving.request import Turn
from lmlong.serving.session_file import Header, SessionInfo
from lmlong.serving.session_store import SessionStore, check_learn
from lmlong.serving.worker import Worker

Result = TypeVar("Result")


class Sessions:
    """The sessions of a server."""

    def __init__(self, store: SessionStore, most_waiting: int):
        self.store = store
        self.worker = Worker("lmlong-sessions", most_waiting)
        self.in_use: set[str] = set()
        self._locks = WeakValueDictionary[str, asyncio.Lock]()

    async def run(self, call: Callable[..., Result], *what: Any) -> Result:
        """Return the result of a method of the store, called beside the event loop."""
        try:
            return await self.worker.run(lambda _: call(*what))
        except LmlongError as error:
            if isinstance(error, tuple(RESPONSES)):
                raise
            raise ApiError(507, "The server's disk does not take the session.", code="insufficient_storage") from None

    async def read(self, call: Callable[..., Iterator[Result | None]], name: str, *what: Any) -> Result:
        """Return what a method yields last. Between its steps others are called, but none that reads the session."""
        async with self._locks.setdefault(name, asyncio.Lock()):
            steps = call(name, *what)
            while (result := await self.run(next, steps)) is None:
                pass
            return result


class Change:
    """A session while one request works on it; a new one has no name yet."""

    def __init__(self, sessions: Sessions, name: str | None, fork: bool = False):
        """Reserve a session, or a new one if `name` is None. With `fork`, the request continues it in a new one: it may
        change meanwhile, and if it is deleted, its file stays."""
        self._sessions, self._name, self._fork, self._reserved = sessions, name, fork, name
        self.branch: Header | None = None
        """The header of the new session, where the request forks one."""
        if name is not None:
            sessions.store.folder.get(name)  # raises 404 for an unknown one
        if name is not None and fork:
            sessions.store.folder.hold(name, 1)
        elif name is not None:
            if name in sessions.in_use:
                message = "Another request works on this session. Wait until it ends, or fork the session."
                raise ApiError(409, message, "session", "session_in_use")
            sessions.in_use.add(name)

    async def start(self, learn: bool | None) -> tuple[Place | None, bool]:
        """Return the place before the request, and whether it is learned from, given what the request asks for. A
        session that learns cannot stop."""
        store = self._sessions.store
        if self._name is None:
            return None, store.trained.learns(learn)
        place, learns, self.branch = await self._sessions.read(store.start, self._name, self._fork)
        check_learn(learns, learn)
        return place, learns or bool(learn)

    async def save(self, turn: Turn) -> SessionInfo:
        """Save the session after the request."""
        return await self._sessions.run(self._sessions.store.save, turn, self.branch or self._name)

    def release(self) -> None:
        """Allow other requests to change the session. Only the first call has an effect, since another request may have
        reserved it by the next."""
        name, self._reserved = self._reserved, None
        if name is not None and self._fork:
            self._sessions.store.folder.hold(name, -1)
        elif name is not None:
            self._sessions.in_use.discard(name)
