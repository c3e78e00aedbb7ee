"""Continuous batching: one thread reads prompts and writes texts for all requests, whose rows join and leave a running
batch at any step.

Long prompts are read in pieces, by turns and between the steps of the rows that are written, so nobody waits for a long
one. A row's text does not depend on its neighbours: it has a state, a sampler and random numbers of its own.
"""

import logging
import time
import traceback
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from threading import Condition, Thread

import torch

from lmlong.decode.engine import engine_of
from lmlong.inference.loading import TrainedLanguageModel
from lmlong.inference.row import advance
from lmlong.inference.state_table import StateTable
from lmlong.model.finite import NotFinite
from lmlong.serving.api_errors import ApiError, busy, scheduler_failed, shutting_down
from lmlong.serving.request import Request
from lmlong.serving.settings import DEFAULT_SETTINGS, Settings
from lmlong.serving.writer import Deliver, Writer

LOG = logging.getLogger("lmlong.serving")

READING_SECONDS = 0.05
"""Time for reading prompts between two steps, while rows are written."""


@dataclass
class Counts:
    """Counters of a scheduler since its start."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    written_tokens: int = 0
    steps: int = 0
    failed: int = 0
    cancelled: int = 0


class Scheduler:
    """Writes the texts of many requests at a time, with one model."""

    def __init__(self, trained: TrainedLanguageModel, states: StateTable, settings: Settings = DEFAULT_SETTINGS):
        self.trained, self.states = trained, states
        self.rows, self.most_waiting = settings.rows, settings.waiting
        self.counts = Counts()
        self._engine = engine_of(trained.model)
        self._waiting = deque[Writer]()
        self._reading = deque[tuple[Writer, Iterator[None]]]()
        self._writing: list[Writer] = []
        self._changed = Condition()
        self._some_cancelled = self._closed = self._failed = False
        self._thread = Thread(target=self._run, name="lmlong-scheduler", daemon=True)
        self._thread.start()

    def submit(self, request: Request, deliver: Deliver) -> Writer:
        """Queue a request, whose events `deliver` gets in another thread. Raises an ApiError
        if the queue is full, or the scheduler closed or failed."""
        writer = Writer(self.trained, request, deliver, self.states)
        with self._changed:
            if self._failed:
                raise scheduler_failed()
            if self._closed:
                raise shutting_down()
            if len(self._waiting) >= self.most_waiting:
                raise busy(f"{self.most_waiting} requests are queued. Try again later.")
            self._waiting.append(writer)
            self.counts.requests += 1
            self._changed.notify()
        return writer

    def cancel(self, writer: Writer) -> None:
        """Free the row of a request before the next step, and deliver no more of its events."""
        with self._changed:
            writer.cancelled = self._some_cancelled = True
            self._changed.notify()

    def close(self) -> None:
        """End all requests, and refuse new ones."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive() and not self._failed

    @property
    def queued(self) -> int:
        return len(self._waiting)

    @property
    def active(self) -> int:
        """Requests whose prompt is being read, or whose text is being written."""
        return len(self._reading) + len(self._writing)

    @torch.inference_mode()
    def _run(self) -> None:
        end = shutting_down
        try:
            while self._wait():
                self._admit()
                self._read()
                self._write()
        except BaseException as error:  # not of one request, whose errors are caught where it is read or written
            stack = "".join(traceback.format_tb(error.__traceback__))  # without the message, which may hold a prompt
            LOG.critical("the scheduler has failed: %s\n%s", type(error).__name__, stack)
            end = scheduler_failed
        with self._changed:
            self._failed = end is scheduler_failed
            writers = [*self._waiting, *self._admitted]
            self._waiting, self._reading, self._writing = deque(), deque(), []
        for writer in writers:
            writer.fail(end())

    def _wait(self) -> bool:
        """Wait for work, and return whether to continue."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._waiting or self.active)
        return not self._closed

    def _admit(self) -> None:
        """Remove cancelled requests, and give free rows to waiting ones."""
        with self._changed:
            if self._some_cancelled:
                self._some_cancelled = False
                self.counts.cancelled += sum(writer.cancelled for writer in [*self._waiting, *self._admitted])
                self._waiting = deque(writer for writer in self._waiting if not writer.cancelled)
                self._reading = deque(pair for pair in self._reading if not pair[0].cancelled)
                self._writing = [writer for writer in self._writing if not writer.cancelled]
            while self._waiting and self.active < self.rows:
                writer = self._waiting.popleft()
                self._reading.append((writer, writer.read()))

    @property
    def _admitted(self) -> Iterator[Writer]:
        yield from (writer for writer, _ in self._reading)
        yield from self._writing

    def _read(self) -> None:
        """Read prompts, a piece at a time of each."""
        until = time.monotonic() + READING_SECONDS
        while self._reading:
            writer, pieces = self._reading.popleft()
            try:
                if next(pieces, self) is not self:
                    self._reading.append((writer, pieces))
                else:
                    writer.begin(self._engine)
                    self.counts.prompt_tokens += writer.prompt_tokens
                    self.counts.cached_tokens += writer.cached_tokens
                    if not writer.ended:
                        self._writing.append(writer)
            except BaseException as error:  # a panic of Rust is no Exception; the other requests continue
                self._fail(writer, error)
            if time.monotonic() > until:
                return

    def _write(self) -> None:
        """Generate a token of each row."""
        writers = self._writing
        if not writers:
            return
        drawn = advance(self._engine, [writer.row for writer in writers if writer.row])
        self.counts.steps += 1  # before any event is delivered
        self.counts.written_tokens += sum(each.token is not None for each in drawn)
        for writer, each in zip(writers, drawn, strict=True):
            try:
                writer.take(each)
            except BaseException as error:
                self._fail(writer, error)
        self._writing = [writer for writer in writers if not writer.ended]

    def _fail(self, writer: Writer, error: BaseException) -> None:
        self.counts.failed += 1
        if isinstance(error, NotFinite) and writer.request.start is not None:  # a state that was uploaded
            message = "The state of this session gives no finite predictions. Create it again from its text."
            error = ApiError(400, message, "session", "invalid_value")
        writer.fail(error)
