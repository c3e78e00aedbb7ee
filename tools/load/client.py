"""A small HTTP client over asyncio, with one connection for each request, and random prompts.

It runs beside the server that is tested, so it does little: it keeps the received bytes and parses them after the
connection has ended.
"""

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

JSON = "application/json"
COMPLETIONS, SESSIONS = "/v1/completions", "/v1/sessions"


def draw_text(draw: random.Random, shortest: int, longest: int) -> str:
    """Return `shortest` to `longest` random letters, spaces and newlines."""
    return "".join(draw.choices("etaoinshrdlu \n", k=draw.randint(shortest, longest)))


class NoAnswer(Exception):
    """A server did not answer, or not with valid HTTP."""


class Refused(Exception):
    """A server answered with an error."""


class Exchange(asyncio.Protocol):
    """One connection: the received pieces."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.pieces.append(data)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    async def end(self, seconds: float) -> bool:
        """Return whether the server closes the connection within some seconds."""
        await asyncio.wait({self.ended}, timeout=seconds)
        return self.ended.done()

    @property
    def received(self) -> bytes:
        return b"".join(self.pieces)


class Answer(NamedTuple):
    """A complete answer."""

    status: int
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def lines(self) -> list[str]:
        """The data of the events of a stream."""
        lines = self.body.decode().split("\n")
        return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]


class Client:
    """Requests to one port of this machine."""

    def __init__(self, port: int):
        self.port = port

    async def connect(self) -> Exchange:
        _, exchange = await asyncio.get_running_loop().create_connection(Exchange, "127.0.0.1", self.port)
        return exchange

    async def ask(self, method: str, path: str, body: bytes = b"", kind: str = JSON, seconds: float = 600.0) -> Answer:
        """Return the complete answer to a request."""
        exchange = await self.connect()
        try:
            exchange.transport.write(self.request(method, path, body, kind))
            if not await exchange.end(seconds):
                raise NoAnswer(f"{method} {path}: incomplete after {seconds:g} s, {len(exchange.received)} bytes")
        finally:
            exchange.transport.abort()
        return Answer(*parsed(exchange.received))

    async def post(self, path: str, **fields: Any) -> Any:
        """Return the JSON of an answer."""
        answer = await self.ask("POST", path, json.dumps(fields).encode())
        if answer.status not in (200, 201):
            raise Refused(f"POST {path}: {answer.status}, {answer.body[:300]!r}")
        return answer.json

    async def get(self, path: str) -> Any:
        """Return the JSON at a path."""
        answer = await self.ask("GET", path)
        if answer.status != 200:
            raise Refused(f"GET {path}: {answer.status}, {answer.body[:300]!r}")
        return answer.json

    async def stream(self, seconds: float = 3600.0, **fields: Any) -> Answer:
        """Return the complete stream of a completion with its usage."""
        body = json.dumps({**fields, "stream": True, "stream_options": {"include_usage": True}})
        return await self.ask("POST", COMPLETIONS, body.encode(), seconds=seconds)

    def request(self, method: str, path: str, body: bytes = b"", kind: str = JSON) -> bytes:
        """Return the bytes of a request."""
        lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close"]
        lines += [f"Content-Type: {kind}", f"Content-Length: {len(body)}"]
        return "\r\n".join([*lines, "", ""]).encode() + body


def parsed(data: bytes) -> tuple[int, bytes]:
    """Return status and body of an answer."""
    head, end, rest = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    words = first.split(" ", 2)
    if not end or words[0] != "HTTP/1.1" or not words[1].isdigit():
        raise NoAnswer(f"not an HTTP answer: {data[:100]!r}")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        rest = b"".join(chunks(rest))
    elif len(rest) != int(headers.get("content-length", len(rest))):
        raise NoAnswer(f"{len(rest)} bytes of {headers['content-length']}")
    return int(words[1]), rest


def chunks(data: bytes) -> Iterator[bytes]:
    """Iterate over the chunks of a body, the last of which is empty."""
    place = 0
    while True:
        line = data.find(b"\r\n", place)
        if line < 0:
            raise NoAnswer(f"the body ends within a chunk, by {data[-60:]!r}")
        size = int(data[place:line], 16)
        place = line + 2 + size + 2
        if not size:
            return
        yield data[line + 2 : line + 2 + size]
