"""Responses that end when their client disconnects: whole, or as server-sent events."""

import asyncio
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterable
from contextlib import suppress
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

from lmlong.serving.answers import ResponseFormat, Usage, pieces, progress_body, session_body
from lmlong.serving.api_errors import ApiError, api_error, shutting_down, timed_out
from lmlong.serving.inbox import Batch, Texts
from lmlong.serving.session_file import SessionInfo

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


async def written(texts: Texts) -> tuple[Batch, SessionInfo | None]:
    """Return all events of texts, and the session after them, once it is saved."""
    batch = []
    while not texts.ended:
        batch += await texts.next()
    return batch, await texts.saved()


class EventStream(ABC):
    """A response that streams events until its texts end."""

    def __init__(self, texts: Texts, deadline: Deadline):
        self._texts, self._deadline = texts, deadline

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
        if first := self.first():
            await send(_body(first))
        while not texts.ended:
            batch = await texts.next(SILENCE)
            if batch and not texts.ended and (pause := until - time.monotonic()) > 0:
                await asyncio.sleep(pause)
                batch += await texts.next(0)
            await send(_body(self.events(batch), b"" if batch else b": waiting\n\n"))
            until = time.monotonic() + TOGETHER
        last = self.last(await texts.saved())
        await send({**_body(last, b"data: [DONE]\n\n"), "more_body": False})

    def first(self) -> list[dict[str, Any]]:
        """Return the events before any text."""
        return []

    @abstractmethod
    def events(self, batch: Batch) -> list[dict[str, Any]]:
        """Return the events of what the scheduler delivered."""

    @abstractmethod
    def last(self, session: SessionInfo | None) -> list[dict[str, Any]]:
        """Return the events after all text, once the session is saved."""

    async def _end_by(self, error: ApiError, send: Send) -> None:
        with suppress(asyncio.TimeoutError):  # the client does not read
            await asyncio.wait_for(send({**_body([error.body]), "more_body": False}), LAST_WORDS)


class TextStream(EventStream):
    """The texts of one of OpenAI's endpoints."""

    def __init__(
        self,
        texts: Texts,
        answer: ResponseFormat,
        usage: Usage,
        numbers: Iterable[int],
        include_usage: bool,
        deadline: Deadline,
    ):
        super().__init__(texts, deadline)
        self._answer, self._usage = answer, usage
        self._numbers, self._include_usage = numbers, include_usage

    def first(self) -> list[dict[str, Any]]:
        choices = filter(None, map(self._answer.first_choice, self._numbers))
        branch = self._texts.branch
        forked = [{**self._answer.chunk(), "session": {"id": branch, "object": "session"}}] if branch else []
        return [*forked, *map(self._answer.chunk, choices)]

    def events(self, batch: Batch) -> list[dict[str, Any]]:
        self._usage.add(batch)
        events = []
        for number, piece in pieces(batch).items():
            if piece.progress:
                events.append(self._answer.chunk(progress=progress_body(piece.progress)))
            if piece.text or piece.tokens or piece.reason:
                events += map(self._answer.chunk, self._answer.choices(number, piece))
        return events

    def last(self, session: SessionInfo | None) -> list[dict[str, Any]]:
        usage = self._usage if self._include_usage else None
        return [self._answer.chunk(usage=usage, session=session)] if session or usage else []


class SessionStream(EventStream):
    """How much of a text has been read into a session, then the session."""

    def events(self, batch: Batch) -> list[dict[str, Any]]:
        return [progress_body(event.progress) for _, event in batch[-1:] if event.progress]

    def last(self, session: SessionInfo | None) -> list[dict[str, Any]]:
        return [session_body(session)] if session else []


def _body(events: Iterable[dict[str, Any]], more: bytes = b"") -> dict[str, Any]:
    """Return a part of the body: each event as a line of JSON, and other bytes."""
    lines = [b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n" for event in events]
    return {"type": "http.response.body", "body": b"".join(lines) + more, "more_body": True}
