"""Worker threads beside the scheduler, and the jobs of two of them: scoring, and rendering chats."""

import asyncio
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Event, Thread, current_thread
from typing import NamedTuple, TypeVar

from lmlong.data.token_file import tokens_of
from lmlong.errors import UsageError
from lmlong.evaluation.scorer import Scorer
from lmlong.evaluation.spans import documents_of, whole
from lmlong.inference import chat
from lmlong.inference.loading import TrainedLanguageModel
from lmlong.serving.api_errors import busy, shutting_down

Result = TypeVar("Result")
Ended = Callable[[], bool]
"""Return whether a job was cancelled. A long job calls it between the pieces of a text."""


class JobFailed(Exception):
    """A job failed with a BaseException, its cause, such as a panic of a library in Rust."""


class Worker:
    """Runs one job at a time in a thread. A bounded number of jobs wait."""

    def __init__(self, name: str, most: int):
        """`most` jobs may wait or run."""
        self.name = name
        self._most, self._jobs = most, 0
        self._thread: Thread | None = None  # it starts with the first job
        self._pool = ThreadPoolExecutor(1, name, initializer=self._begin)
        self._closed = Event()

    @property
    def alive(self) -> bool:
        """Whether the thread still takes jobs."""
        return self._thread is None or self._thread.is_alive()

    async def run(self, job: Callable[[Ended], Result]) -> Result:
        """Return the result of a job. Cancelling this call ends the job."""
        if self._closed.is_set():
            raise shutting_down()
        if self._jobs >= self._most:
            raise busy(f"{self._most} requests of this kind are queued. Try again later.")
        left = Event()
        ended = lambda: left.is_set() or self._closed.is_set()  # noqa: E731
        self._jobs += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, _result, job, ended)
        finally:
            left.set()
            self._jobs -= 1

    def close(self) -> None:
        """End all jobs, also those that wait."""
        self._closed.set()
        self._pool.shutdown(wait=False)

    def _begin(self) -> None:
        self._thread = current_thread()


def _result(job: Callable[[Ended], Result], ended: Ended) -> Result:
    """Return the result of a job. Every error becomes an Exception, since a BaseException would stop the server."""
    if ended():
        raise shutting_down()
    try:
        return job(ended)
    except Exception:
        raise
    except BaseException as error:
        raise JobFailed(type(error).__name__) from error


class Score(NamedTuple):
    """The negative log-probability of a text, in bits, as one whole document with its end."""

    tokens: int
    bytes: int
    bits: float


def score(trained: TrainedLanguageModel, text: str, ended: Ended, learn: bool = False) -> Score:
    """Return the same sums as `lmlong.evaluate` with `precision="32"`; with `learn`, learning from the text."""
    tokens = tokens_of([text], trained.tokenizer)
    documents = documents_of(tokens)
    scorer = Scorer(replace(trained, learn=learn), tokens.tokens, documents)
    sums = documents.sums()
    for _, first, nats in scorer.scored(whole(documents)):
        if ended():
            raise shutting_down()
        sums.add(0, nats.sum(), len(nats), scorer.sizes(slice(first, first + len(nats))).sum())
    totals = sums.totals
    return Score(totals.tokens, totals.bytes, totals.nats / math.log(2))


def chat_tokens(trained: TrainedLanguageModel, messages: Sequence[chat.Message], ended: Ended) -> tuple[int, ...]:
    """Return the tokens of messages, up to where the answer to them begins."""
    try:
        return tuple(chat.encode(trained.tokenizer, chat.render(trained.tokenizer, messages)))
    except UsageError:
        if ended():  # which ends the rendering too
            raise shutting_down() from None
        raise
