"""Events from the scheduler's thread to the event loop, and the texts of one request."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from threading import Lock

from lmlong.serving.api_errors import ApiError, api_error
from lmlong.serving.metrics import Metrics
from lmlong.serving.request import Event, Request, Turn
from lmlong.serving.scheduler import Scheduler
from lmlong.serving.session_change import Change
from lmlong.serving.session_file import SessionInfo
from lmlong.serving.writer import Writer

Batch = list[tuple[int, Event]]
"""Events in order, each with the number of its text."""

OVERHEAD = 100
"""Bytes that are counted for an event, and for each of its alternatives, in addition to the text."""


class Inbox:
    """A queue of events, limited to about `most` bytes if nobody reads it."""

    def __init__(self, most: int, on_lag: Callable[[], None]):
        self._most, self._on_lag = most, on_lag
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()
        self._lock = Lock()
        self._events: Batch = []
        self._size = 0
        self.lagged = False

    def put(self, number: int, event: Event) -> None:
        """Add an event. Called in the scheduler's thread, so this neither fails nor waits."""
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
                self._loop.call_soon_threadsafe(self._arrived.set)

    async def take(self, seconds: float | None = None) -> Batch:
        """Wait for events, up to the timeout, and remove and return all there are."""
        while True:
            with self._lock:
                self._arrived.clear()
                events, self._events, self._size = self._events, [], 0
            if events or self.lagged:
                return events
            waiting = asyncio.ensure_future(self._arrived.wait())
            try:  # not wait_for, which up to Python 3.11 takes no notice of its end when the event comes at that moment
                await asyncio.wait({waiting}, timeout=seconds)
            finally:
                waiting.cancel()
            if not self._arrived.is_set():
                return []


class Texts:
    """The texts of one request, while the scheduler generates them."""

    def __init__(
        self,
        scheduler: Scheduler,
        requests: Sequence[Request],
        most: int,
        metrics: Metrics,
        change: Change | None = None,
    ):
        """`change` is the session that the request continues, if any."""
        self._scheduler, self._metrics, self._begun = scheduler, metrics, time.perf_counter()
        self._change = change
        self._turn: Turn | None = None
        self._writers: list[Writer] = []
        self._inbox = Inbox(most, self._cancel)
        self._left = len(requests)
        self._has_begun = False
        try:
            for number, request in enumerate(requests):
                self._writers.append(scheduler.submit(request, partial(self._inbox.put, number)))
        except Exception as error:
            self.close()
            raise api_error(error) from None

    @property
    def ended(self) -> bool:
        return not self._left

    @property
    def branch(self) -> str | None:
        """The id of the session that the request creates from another, if it forks one."""
        return self._change.branch.id if self._change and self._change.branch else None

    async def stop(self) -> None:
        """End texts whose generation has begun after their next token, and save the session after them."""
        for writer in self._writers:
            writer.stopping = True
        while self._has_begun and not self.ended:
            await self.next()
        await self.saved()

    def close(self) -> None:
        """Cancel unfinished texts, and release the session."""
        self._cancel()
        self._turn = None  # with a state, like those of the writers
        if self._change:
            self._change.release()

    def _cancel(self) -> None:
        for writer in self._writers:
            if not writer.ended:
                self._scheduler.cancel(writer)
        self._writers = []  # breaks a reference cycle, which would keep their states until it is collected

    async def next(self, seconds: float | None = None) -> Batch:
        """Wait for events, up to the timeout, and return those since the last call. Raises an ApiError if a text
        fails."""
        batch = await self._inbox.take(seconds)
        if self._inbox.lagged:
            raise ApiError(400, "The stream was read too slowly, and ended.", code="slow_reader")
        if not self._has_begun and any(event.progress is None for _, event in batch):
            self._has_begun = True
            self._metrics.first_token.observe(time.perf_counter() - self._begun)
        for _, event in batch:
            if event.error is not None:
                raise api_error(event.error) from None
            self._left -= event.end is not None
            self._turn = event.turn or self._turn
        if batch and self.ended:
            self._metrics.whole.observe(time.perf_counter() - self._begun)
        return batch

    async def saved(self) -> SessionInfo | None:
        """Save the session after the texts, if there is one that is not saved yet."""
        turn, self._turn = self._turn, None
        if self._change is None or turn is None:
            return None
        return await self._change.save(turn)
