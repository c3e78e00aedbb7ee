"""Work beside the event loop: one job at a time, a bounded queue, and who is cancelled ends."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from serving.schedulers import tiny
from serving.servers import until

from lmlong.serving.api_errors import ApiError
from lmlong.serving.inbox import Inbox
from lmlong.serving.request import Event
from lmlong.serving.worker import Worker, score


class Job:
    """A job that runs until it is cancelled."""

    def __init__(self) -> None:
        self.begun, self.over = threading.Event(), threading.Event()

    def __call__(self, ended: Callable[[], bool]) -> None:
        self.begun.set()
        until(ended)
        self.over.set()


def start(work: Coroutine[Any, Any, Any]) -> "asyncio.Future[Any]":
    return asyncio.ensure_future(work)


def test_jobs_run_one_after_the_other_and_few_wait() -> None:
    async def go() -> None:
        worker, jobs = Worker("test", 3), [Job(), Job(), Job()]
        tasks = [start(worker.run(job)) for job in jobs]
        await asyncio.to_thread(jobs[0].begun.wait, 30)
        assert not jobs[1].begun.is_set()
        with pytest.raises(ApiError) as refused:
            await worker.run(Job())
        assert refused.value.status == 429
        tasks[0].cancel()
        await asyncio.to_thread(jobs[0].over.wait, 30)
        await asyncio.to_thread(jobs[1].begun.wait, 30)
        assert jobs[0].over.is_set() and jobs[1].begun.is_set(), "who leaves makes room"
        worker.close()
        cancelled, running, waiting = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30)
        assert isinstance(cancelled, asyncio.CancelledError) and running is None
        assert isinstance(waiting, ApiError) and waiting.code == "shutting_down"
        with pytest.raises(ApiError, match="shutting down"):
            await worker.run(Job())

    asyncio.run(go())


def test_two_that_leave_at_once_stop_no_worker() -> None:
    """The one that waits may have left when its turn comes, in the same round of the event loop."""

    async def go() -> None:
        worker, first = Worker("test", 4), Job()
        running, waiting = (start(worker.run(job)) for job in (first, Job()))
        await asyncio.to_thread(first.begun.wait, 30)
        running.cancel()
        waiting.cancel()
        await asyncio.gather(running, waiting, return_exceptions=True)
        assert await asyncio.wait_for(worker.run(lambda ended: 7), 30) == 7
        worker.close()

    asyncio.run(go())


def test_a_job_ends_within_its_text() -> None:
    asked: list[None] = []

    def ended() -> bool:
        asked.append(None)
        return len(asked) == 2

    with pytest.raises(ApiError, match="shutting down"):
        score(tiny(), "It was a dark and stormy night. " * 2000, ended)
    assert len(asked) == 2, "the rest is not read"


def test_who_is_told_to_stop_stops_though_an_event_comes_at_that_moment() -> None:
    async def stop_after(turns: int) -> bool:
        inbox = Inbox(1000, lambda: None)
        waiting = asyncio.ensure_future(inbox.take(60))
        await asyncio.sleep(0.001)
        inbox.put(0, Event("a"))
        for _ in range(turns):
            await asyncio.sleep(0)
        told = waiting.cancel()
        await asyncio.wait({waiting})
        return waiting.cancelled() == told

    assert all(asyncio.run(stop_after(turns)) for turns in range(10))
