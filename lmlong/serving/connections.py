"""Connections of clients: bounded in number, and closed if nothing arrives on them.

A connection that sends nothing costs a client nothing, but takes an open file of the server. A process has a limited
number of those, and at the limit nobody can connect.
"""

import asyncio
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

MOST = 8192
"""Simultaneous connections, if the process may open that many files."""

OTHER_FILES = 64
"""Open files reserved for sessions, libraries and pipes."""

LONGEST_HEAD = 32 << 10
"""Maximum bytes of the head of a request."""

REFUSAL = b'{"error":{"message":"All connections are in use. Try again later.","type":"server_error"}}'
REFUSED = b"\r\n".join(
    [
        b"HTTP/1.1 503 Service Unavailable",
        b"Content-Type: application/json",
        b"Content-Length: %d" % len(REFUSAL),
        b"Retry-After: 1",
        b"Connection: close",
        b"",
        REFUSAL,
    ]
)


@dataclass(frozen=True)
class ConnectionLimits:
    """How many connections there may be, and how long each may take, in seconds."""

    most: int = MOST
    backlog: int = 2048
    """Connections that the system accepts before the event loop sees them."""
    head: float = 20.0
    """From the connection, or the last response, to the end of the head of the next request."""
    body: float = 30.0
    """Between two pieces of a body."""
    unread: float = 300.0
    """In which a client reads nothing of a response, beyond what the system buffers."""

    @classmethod
    def of_process(cls) -> "ConnectionLimits":
        """Return limits that reserve some of the files that this process may open."""
        files = open_files()
        backlog = max(16, min(cls.backlog, files // 4))
        return cls(most=max(16, min(MOST, files - backlog - OTHER_FILES)), backlog=backlog)


def open_files() -> int:
    """Return how many files this process may open."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return most if most != resource.RLIM_INFINITY else 1 << 20
    return 1 << 20  # sockets are not files on Windows


class Connections:
    """All connections of a server."""

    def __init__(self, limits: ConnectionLimits):
        self.limits = limits
        self._all: set[Connection] = set()
        self._idle: dict[Connection, float] = {}  # since when no request runs, oldest first

    def add(self, connection: "Connection") -> bool:
        """Count a new connection, and return whether it may stay: at the limit, the one that has been idle the longest
        is closed instead."""
        if len(self._all) >= self.limits.most:
            if not self._idle:
                return False
            oldest = next(iter(self._idle))
            oldest.transport.abort()
            self.remove(oldest)
        self._all.add(connection)
        self._idle[connection] = time.monotonic()
        return True

    def remove(self, connection: "Connection") -> None:
        self._all.discard(connection)
        self._idle.pop(connection, None)

    def note(self, connection: "Connection") -> None:
        """Note whether a connection is idle, after an event of it."""
        if connection.is_busy:
            self._idle.pop(connection, None)
        elif connection in self._all:
            self._idle.setdefault(connection, time.monotonic())

    def close_stalled(self) -> None:
        """Close the connections that exceed their limits."""
        now = time.monotonic()
        for connection in [*self._too_long_idle(now), *(one for one in self._all if one.is_stalled(now, self.limits))]:
            connection.transport.abort()
            self.remove(connection)

    def _too_long_idle(self, now: float) -> Iterable["Connection"]:
        for connection, since in self._idle.items():
            if now - since <= self.limits.head:
                return
            yield connection


class Connection(H11Protocol):
    """A connection of a client."""

    def __init__(self, connections: Connections, **options: Any):
        super().__init__(**options)
        self._all = connections
        self._received = self._taken = time.monotonic()
        self._unsent = 0

    @property
    def is_busy(self) -> bool:
        """Whether a request runs: its head has arrived, and its response has not ended."""
        return self.cycle is not None and not self.cycle.response_complete

    def is_stalled(self, now: float, limits: ConnectionLimits) -> bool:
        """Return whether a body does not arrive, or a response is not read; called about once a second."""
        unsent = self.transport.get_write_buffer_size()
        if unsent == 0 or unsent < self._unsent:
            self._taken = now
        self._unsent = unsent
        waits_for_body = self.is_busy and self.cycle.more_body and not self.cycle.response_started
        return (waits_for_body and now - self._received > limits.body) or now - self._taken > limits.unread

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if not self._all.add(self):
            transport.write(REFUSED)
            transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._all.remove(self)
        super().connection_lost(error)

    def data_received(self, data: bytes) -> None:
        self._received = time.monotonic()
        super().data_received(data)
        self._all.note(self)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._all.note(self)
