"""The server: an application of `make_app` on a socket, until a signal stops it."""

import asyncio
import errno
import gc
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import HANDLED_SIGNALS

from lmlong.errors import UsageError
from lmlong.io.lock import Held, lock
from lmlong.io.system_errors import explain_errors

LONGEST_HEAD = 32 << 10
"""Maximum bytes of the head of a request."""

LONGEST_READ = 4 << 10
"""Bytes read from a connection at once. A chunked body may have a chunk for every six bytes, and the parser, which is
Python, takes all that was read before any other connection has its turn."""

ACCEPTED = 64
"""Maximum number of connections accepted before others have their turn."""

WAITING = 4096
"""Maximum number of connections that wait to be accepted. The system drops further ones, which try again a second
later."""

OTHER_FILES = 128
"""Open files reserved for sessions, libraries and pipes."""

KEEP_ALIVE = 20
"""Seconds after a response in which a connection waits for the next request."""

SPARE = 5.0
"""Seconds after the grace in which clients get an error response, before connections are closed."""


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to this address, which does not listen yet."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UsageError(f"--host: {host} is no address here ({error.strerror}). Give another.") from None
    try:
        if os.name == "posix":  # where it lets nobody share a port that is in use
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise _not_had(error, host, port) from None
    return bound


def _not_had(error: OSError, host: str, port: int) -> UsageError:
    why = error.strerror or str(error)
    if error.errno == errno.EADDRNOTAVAIL:
        return UsageError(f"--host: {host} is not an address of this machine. Give one that is, or 0.0.0.0 for all.")
    return UsageError(f"--port: {port} of {host} cannot be had ({why}). Give another, or 0 for any.")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder of sessions, which is created if missing."""
    with explain_errors(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        with lock(folder / "lock"):
            yield
    except Held:
        remedy = "Name another folder by --sessions."
        raise UsageError(f"{folder}: another server keeps its sessions there. {remedy}") from None


def prepare_process() -> None:
    """Tune this process for serving, once everything is loaded."""
    gc.freeze()  # libraries and weights stay: a garbage collection of them would stop all streams for 0.1 s
    with suppress(ImportError, OSError, ValueError):
        import resource

        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each connection is an open file


def connection_limits() -> tuple[int, int]:
    """Return how many connections there may be, each of which is an open file, and how many are accepted at once."""
    files = 1 << 16  # sockets are not files on Windows
    with suppress(ImportError, OSError):
        import resource

        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        files = files if most == resource.RLIM_INFINITY else most
    accepted = min(ACCEPTED, files // 4)
    return max(16, files - accepted - OTHER_FILES), accepted


class Connection(H11Protocol):
    """A connection of a client, which is closed at once if there are too many: each is an open file, and a process that
    has no more of those accepts none."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.max_size = LONGEST_READ  # type: ignore[attr-defined]
        if self.limit_concurrency is not None and len(self.connections) > self.limit_concurrency:
            transport.abort()


class Server(uvicorn.Server):
    """A server that stops on SIGINT or SIGTERM: it refuses new requests, gives running ones `grace` seconds to finish,
    and ends the rest. A second signal stops it immediately."""

    def __init__(
        self,
        app: Starlette,
        listening: socket.socket,
        grace: float,
        on_start: Callable[[], None],
    ):
        """`on_start` is called once the server listens."""
        most, accepted = connection_limits()
        config = uvicorn.Config(
            app,
            http=Connection,
            h11_max_incomplete_event_size=LONGEST_HEAD,
            limit_concurrency=most,
            backlog=accepted,
            loop="asyncio",
            timeout_keep_alive=KEEP_ALIVE,
            ws="none",
            lifespan="on",
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=grace + SPARE,  # type: ignore[arg-type]
        )
        super().__init__(config)
        self._app, self._listening, self._grace, self._on_start = app, listening, grace, on_start
        self.received = 0
        """The signal that stopped it."""

    def serve_until_signal(self) -> int:
        """Serve, and return the signal that stopped it; 0 if `should_exit` was set."""
        self.run([self._listening])
        return self.received

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except OSError as error:  # another program took the port
            raise _not_had(error, *self._listening.getsockname()[:2]) from None
        self._listening.listen(WAITING)
        self._on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        service = self._app.state.service
        service.closing = True
        ending = asyncio.ensure_future(self._end(service.end))
        await super().shutdown(sockets)
        ending.cancel()

    async def _end(self, end: Callable[[], None]) -> None:
        await asyncio.sleep(self._grace)
        await asyncio.to_thread(end)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.received:
            os._exit(128 + sig)
        self.received, self.should_exit = sig, True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in HANDLED_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
