"""Middleware that checks the API key, the host name and the size of the body of each request."""

import asyncio
import hmac
import ipaddress
import re
import socket
from collections.abc import Collection, Sequence
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lmlong.data.formats.table import SUFFIXES
from lmlong.serving import page
from lmlong.serving.api_errors import ApiError, busy, shutting_down
from lmlong.serving.metrics import HttpMetrics
from lmlong.serving.settings import Settings

OPEN = frozenset({"/health", "/ready", *page.FILES})
"""Paths that need no key: health checks, and the page, which is public."""

BODY = "lmlong.body"
"""The key of a request's scope that holds its body."""

STATE = "application/vnd.lmlong.state"
FILES = frozenset({"application/octet-stream", STATE, *SUFFIXES})
"""Media types of files. A page of another site cannot send them, or JSON, without a preflight, which this server does
not answer. It can send text/plain, which is therefore refused."""

OF_FILES = re.compile(r"/v1/sessions(/[^/]+/append)?")
"""Paths that accept files."""

A_FORK = re.compile(r"/v1/sessions/[^/]+/fork")
"""Paths whose requests need no body, and so no type. A page of another site can request them, but knows no session."""

A_SESSION = re.compile(r"(?<=^/v1/sessions/)[^/]+")

LONGEST_SHOWN = 80
"""Characters of a header that an error quotes."""

LOCAL = ("localhost", "127.0.0.1", "::1")


def media_type(headers: Headers) -> str:
    return headers.get("content-type", "").partition(";")[0].strip().lower()


class Hosts:
    """The host names that requests may use. A page of another site whose name resolves to this server (DNS rebinding)
    uses that name, and is refused."""

    def __init__(self, bound: str, additional: Collection[str] = ()):
        address = _address(bound)
        self.is_local = bound == "localhost" or (address is not None and address.is_loopback)
        self._is_everywhere = address is not None and address.is_unspecified
        self._names = {bound.lower(), *map(str.lower, additional)}
        if self.is_local or self._is_everywhere:
            self._names |= {*LOCAL}
        if self._is_everywhere:
            self._names.add(socket.gethostname().lower())

    def __contains__(self, header: str) -> bool:
        name = header.strip().lower()
        name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
        return name in self._names or (self._is_everywhere and _address(name) is not None)


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


class Guard:
    """Passes on only valid requests, with their bodies read."""

    def __init__(
        self,
        app: ASGIApp,
        hosts: Hosts,
        key: str | None,
        settings: Settings,
        metrics: HttpMetrics,
        paths: Collection[str],
    ):
        self._app, self._hosts, self._settings, self._metrics, self._paths = app, hosts, settings, metrics, paths
        self._token = None if key is None else b"Bearer " + key.encode()
        self._held = 0  # bytes of bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        parts: list[bytes] = []

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = A_SESSION.sub("{name}", scope["path"])
                path = path if path in self._paths else "other"
                self._metrics.responses.labels(path, message["status"]).inc()
            await send(message)

        try:
            self._check(scope)
            try:
                await asyncio.wait_for(self._read(scope, receive, parts), self._settings.timeout)
            except asyncio.TimeoutError:
                raise ApiError(408, "The body took too long to arrive.", code="timeout") from None
            scope[BODY] = b"".join(parts)
            await self._app(scope, receive, counted)
        except asyncio.CancelledError:  # the server ends
            with suppress(Exception):
                await shutting_down().response()(scope, receive, counted)
        except ApiError as error:
            await asyncio.sleep(0)  # lets uvicorn notice that it has already refused a body that is not HTTP
            await error.response()(scope, receive, counted)
        finally:
            self._held -= sum(map(len, parts))

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if headers.get("host", "") not in self._hosts:
            raise ApiError(421, "Unknown host name. Start the server with --allowed-host NAME.", code="unknown_host")
        given = headers.get("authorization", "").encode("latin-1")
        if self._token and scope["path"] not in OPEN and not hmac.compare_digest(given, self._token):
            challenge = {"WWW-Authenticate": "Bearer"}
            raise ApiError(
                401, "Send the API key of this server as a bearer token.", None, "invalid_api_key", challenge
            )
        if scope["method"] != "POST":
            return
        kind = media_type(headers)
        takes_files = OF_FILES.fullmatch(scope["path"]) is not None
        needs_body = A_FORK.fullmatch(scope["path"]) is None
        is_known = kind == "application/json" or (takes_files and kind in FILES) or not (kind or needs_body)
        if not is_known or headers.get("content-encoding", "identity") != "identity":
            raise _unsupported(kind, headers.get("content-encoding", "identity"), is_known, takes_files)
        size = headers.get("content-length", "0")
        if size.isdecimal() and int(size[:20]) > self._settings.max_body:
            raise self._too_large()

    async def _read(self, scope: Scope, receive: Receive, parts: list[bytes]) -> None:
        """Read the body, unless it or all bodies together exceed a limit."""
        size, more = 0, True
        takes_body = scope["method"] == "POST" and scope["path"] not in OPEN
        while more:
            message: Message = await receive()
            if message["type"] == "http.disconnect":
                raise ApiError(400, "The body is not whole.")  # nobody reads it
            part = message.get("body", b"")
            parts.append(part)
            size += len(part)
            self._held += len(part)
            more = message.get("more_body", False)
            if size and not takes_body:
                raise ApiError(413, "This request must not have a body.", code="body_too_large")
            if size > self._settings.max_body:
                raise self._too_large()
            if self._held > self._settings.held:
                raise busy("The request bodies exceed the memory limit of the server. Try again later.")

    def _too_large(self) -> ApiError:
        return ApiError(413, f"The body has more than {self._settings.max_body:,} bytes.", code="body_too_large")


def _unsupported(kind: str, encoding: str, is_known: bool, takes_files: bool) -> ApiError:
    """Return the refusal of a body by its type or encoding, with what to send instead."""
    if is_known:
        message = f"Content-Encoding is {encoding[:LONGEST_SHOWN]}. Send the body as it is, not compressed."
    else:
        of_file = "curl -H 'Content-Type: application/octet-stream' --data-binary @FILE"
        remedy = f"For a file, send application/octet-stream, for example by {of_file}; for JSON, application/json."
        remedy = remedy if takes_files else "Send application/json."
        message = f"Content-Type is {kind[:LONGEST_SHOWN] or 'missing'}. {remedy}"
    return ApiError(415, message, code="unsupported_media_type")


def warning(hosts: Hosts, bound: str, key: str | None) -> Sequence[str]:
    """Return the warning lines for a server that anybody may use."""
    if hosts.is_local or key:
        return ()
    line = f"WARNING: {bound} can be reached from other machines, and needs no key: anybody may use this server."
    return (line, "WARNING: Set LMLONG_API_KEY, or leave --host out.")
