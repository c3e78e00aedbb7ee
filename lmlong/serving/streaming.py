"""Responses that end when their client disconnects: whole, or as server-sent events."""

import asyncio
import json
import time
from collections.abc import Coroutine, Iterable
from contextlib import closing, suppress
from typing import Any, TypeVar

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from lmlong.serving.answers import ResponseFormat
from lmlong.serving.api_errors import ApiError, api_error, shutting_down, timed_out
from lmlong.serving.inbox import Batch, Texts

Result = TypeVar("Result")

TOGETHER = 0.02
"""Seconds within which tokens are sent together."""

SILENCE = 15.0
"""Seconds without an event after which a comment keeps the connection alive, for example while a prompt is read."""

LAST_WORDS = 1.0
"""Seconds in which a client must read the error that ends its stream."""

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold tokens back
]


class Deadline:
    """The time limit of a request."""

    def __init__(self, seconds: float):
        self.seconds, self._end = seconds, time.monotonic() + seconds

    @property
    def left(self) -> float:
        return max(0.0, self._end - time.monotonic())


class Disconnected(Exception):
    """The client has disconnected, so it gets no response."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result], deadline: Deadline) -> Result:
    """Return the result of `work`, which is cancelled if the client disconnects or the deadline passes. Raises
    Disconnected or an ApiError."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, gone}, timeout=deadline.left, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        if gone.done():
            raise Disconnected
        raise timed_out(deadline.seconds)
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def respond(
    texts: Texts, answer: ResponseFormat, is_stream: bool, deadline: Deadline, status: int = 200
) -> ASGIApp:
    """Return the response with the texts of a request, whole or as a stream."""
    if is_stream:
        return EventStream(texts, answer, deadline)
    with closing(texts):
        batch: Batch = []
        while not texts.ended:
            batch += await texts.next()
        session = await texts.saved()
    return JSONResponse(answer.whole(batch, session), status)


class EventStream:
    """A response that streams events until its texts end."""

    def __init__(self, texts: Texts, answer: ResponseFormat, deadline: Deadline):
        self._texts, self._answer, self._deadline = texts, answer, deadline

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            await while_connected(receive, self._stream(send), self._deadline)
        except Disconnected:
            pass
        except asyncio.CancelledError:
            await self._end_by(shutting_down(), send)
            raise
        except Exception as error:
            await self._end_by(api_error(error), send)
        finally:
            if self._texts.branch:
                with suppress(Exception):  # such as of a scheduler that has ended
                    await self._texts.stop()
            self._texts.close()

    async def _stream(self, send: Send) -> None:
        texts, until = self._texts, 0.0
        if first := self._answer.first(texts.branch):
            await send(_body(first))
        while not texts.ended:
            batch = await texts.next(SILENCE)
            if batch and not texts.ended and (pause := until - time.monotonic()) > 0:
                await asyncio.sleep(pause)
                batch += await texts.next(0)
            await send(_body(self._answer.events(batch), b"" if batch else b": waiting\n\n"))
            until = time.monotonic() + TOGETHER
        last = self._answer.last(await texts.saved())
        await send({**_body(last, b"data: [DONE]\n\n"), "more_body": False})

    async def _end_by(self, error: ApiError, send: Send) -> None:
        with suppress(asyncio.TimeoutError):  # the client does not read
            await asyncio.wait_for(send({**_body([error.body]), "more_body": False}), LAST_WORDS)


def _body(events: Iterable[dict[str, Any]], more: bytes = b"") -> dict[str, Any]:
    """Return a part of the body: each event as a line of JSON, and other bytes."""
    lines = [b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n" for event in events]
    return {"type": "http.response.body", "body": b"".join(lines) + more, "more_body": True}
