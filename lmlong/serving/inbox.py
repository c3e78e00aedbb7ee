"""The way of events from the engine's thread to the event loop, and the texts that one request asks for."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from threading import Lock

from lmlong.inference.session import Session
from lmlong.serving.api_errors import ApiError, told
from lmlong.serving.engine import Engine
from lmlong.serving.metrics import Metrics
from lmlong.serving.request import Event, Request
from lmlong.serving.session_change import Change
from lmlong.serving.sessions import SessionInfo
from lmlong.serving.writer import Writer

Batch = list[tuple[int, Event]]
"""Events in their order, each with the number of its text."""

OVERHEAD = 100
"""Bytes that an event, and each token that is told with it, count beside their text."""


class Inbox:
    """Events on their way. Of a reader that takes none, no more than about `most` bytes are kept."""

    def __init__(self, most: int, on_lag: Callable[[], None]):
        self._most, self._on_lag = most, on_lag
        self._loop = asyncio.get_running_loop()
        self._there = asyncio.Event()
        self._lock = Lock()
        self._events: Batch = []
        self._size = 0
        self.lagged = False

    def put(self, number: int, event: Event) -> None:
        """Add an event; called in the engine's thread, which must never fail or wait here."""
        with self._lock:
            if self.lagged:
                return
            wake = not self._events
            self._events.append((number, event))
            self._size += OVERHEAD + len(event.text) + (OVERHEAD * len(event.token.alternatives) if event.token else 0)
            self.lagged = self._size > self._most
            if self.lagged:
                self._events = []
        with suppress(RuntimeError):  # the loop has ended
            if self.lagged:
                self._loop.call_soon_threadsafe(self._on_lag)
            if wake or self.lagged:
                self._loop.call_soon_threadsafe(self._there.set)

    async def wait(self, seconds: float | None = None) -> bool:
        """Return whether there are events, once there are or the time is over."""
        if not self._there.is_set():
            waiting = asyncio.ensure_future(self._there.wait())
            try:  # not wait_for, which up to Python 3.11 takes no notice of its end when the event comes at that moment
                await asyncio.wait({waiting}, timeout=seconds)
            finally:
                waiting.cancel()
        return self._there.is_set()

    def take(self) -> Batch:
        """Return all events that are there."""
        with self._lock:
            self._there.clear()
            events, self._events, self._size = self._events, [], 0
        return events


class Texts:
    """The texts that one request asks for, while the engine writes them."""

    def __init__(
        self,
        engine: Engine,
        requests: Sequence[Request],
        most: int,
        metrics: Metrics,
        change: Change | None = None,
    ):
        """`change` is what becomes of the session that one request goes on from."""
        self._engine, self._metrics, self._begun = engine, metrics, time.perf_counter()
        self._change = change
        self._session: Session | None = None
        self._writers: list[Writer] = []
        self._inbox = Inbox(most, self._cancel)
        self._left = len(requests)
        self._has_begun = False
        try:
            for number, request in enumerate(requests):
                self._writers.append(engine.submit(request, partial(self._inbox.put, number)))
        except Exception as error:
            self.close()
            raise told(error) from None

    @property
    def ended(self) -> bool:
        return not self._left

    def close(self) -> None:
        """Free the rows of what is not written yet, and the session."""
        self._cancel()
        if self._change:
            self._change.release()

    def _cancel(self) -> None:
        for writer in self._writers:
            self._engine.cancel(writer)
        self._writers = []  # they know who reads them: a circle, which would keep their states until it is collected

    async def next(self, seconds: float | None = None) -> Batch:
        """Return what was written since the last call: something, or nothing once the time is over; an ApiError where
        a text fails."""
        batch = self._inbox.take()
        while not batch and not self._inbox.lagged and await self._inbox.wait(seconds):
            batch = self._inbox.take()
        if self._inbox.lagged:
            raise ApiError(400, "The stream was read too slowly, and ended.", code="slow_reader")
        if batch and not self._has_begun:
            self._has_begun = True
            self._metrics.first_token.observe(time.perf_counter() - self._begun)
        for _, event in batch:
            if event.error is not None:
                raise told(event.error) from None
            self._left -= event.is_last
            self._session = event.session or self._session
            self._metrics.prompt_tokens.inc(event.prompt_tokens)
        if batch and self.ended:
            self._metrics.whole.observe(time.perf_counter() - self._begun)
        return batch

    async def saved(self) -> SessionInfo | None:
        """Keep the session after all that was told, where there is one."""
        if self._change is None or self._session is None:
            return None
        return await self._change.save(self._session)
