"""Work beside the engine: one job at a time, few that wait, and none that nobody waits for."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from serving.engines import loaded
from serving.servers import until

from lmlong.serving.api_errors import ApiError
from lmlong.serving.aside import Worker, score
from lmlong.serving.engine import Closed

TEXT = "It was a dark and stormy night. " * 2000


class Job:
    """A job that goes on until nobody waits for it."""

    def __init__(self) -> None:
        self.begun, self.over = threading.Event(), threading.Event()

    def __call__(self, ended: Callable[[], bool]) -> None:
        self.begun.set()
        until(ended)
        self.over.set()


def test_jobs_run_one_after_the_other_and_few_wait() -> None:
    async def go() -> None:
        worker, jobs = Worker("test", 2), [Job(), Job()]
        tasks = [asyncio.ensure_future(worker.run(job)) for job in jobs]
        await asyncio.sleep(0.1)
        assert jobs[0].begun.is_set() and not jobs[1].begun.is_set()
        with pytest.raises(ApiError) as refused:
            await worker.run(Job())
        assert refused.value.status == 429
        tasks[0].cancel()
        await asyncio.to_thread(jobs[0].over.wait, 30)
        await asyncio.to_thread(jobs[1].begun.wait, 30)
        assert jobs[0].over.is_set() and jobs[1].begun.is_set(), "who leaves makes room"
        assert await asyncio.wait_for(asyncio.shield(asyncio.gather(tasks[0], return_exceptions=True)), 30)
        worker.close()
        await asyncio.wait_for(tasks[1], 30)
        with pytest.raises(Closed):
            await worker.run(Job())

    asyncio.run(go())


def test_owners_take_turns() -> None:
    async def go() -> None:
        worker, done = Worker("test", 4, owners=2), list[str]()
        first = Job()
        running = asyncio.ensure_future(worker.run(first, "a"))
        tasks = [asyncio.ensure_future(worker.run(lambda _: done.append("a"), "a")) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError):
            await worker.run(Job(), "a")
        tasks += [asyncio.ensure_future(worker.run(lambda _: done.append("b"), "b")) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError):
            await worker.run(Job(), "b")
        tasks[0].cancel()  # which waits
        running.cancel()  # which goes on
        await asyncio.wait_for(asyncio.gather(*tasks, running, return_exceptions=True), 30)
        assert done == ["a", "b", "a", "b"] or done == ["b", "a", "b", "a"]
        worker.close()

    asyncio.run(go())


def test_two_that_leave_at_once_stop_no_worker() -> None:
    """The one that waits may have left when its turn comes, in the same round of the event loop."""

    async def go() -> None:
        worker = Worker("test", 4)
        running, waiting = (asyncio.ensure_future(worker.run(Job())) for _ in range(2))
        await asyncio.sleep(0.1)
        running.cancel()
        waiting.cancel()
        left = await asyncio.gather(running, waiting, return_exceptions=True)
        assert all(isinstance(error, asyncio.CancelledError) for error in left)
        assert await asyncio.wait_for(worker.run(lambda ended: 7), 30) == 7
        worker.close()

    asyncio.run(go())


def test_all_that_wait_are_told_of_the_end() -> None:
    async def go() -> None:
        worker, job = Worker("test", 4), Job()
        tasks = [asyncio.ensure_future(worker.run(job)) for _ in range(3)]
        await asyncio.to_thread(job.begun.wait, 30)
        worker.close()
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30)
        assert results[0] is None and [type(result) for result in results[1:]] == [Closed, Closed]

    asyncio.run(go())


def test_a_job_ends_within_its_text(tmp_path: Path) -> None:
    asked: list[None] = []

    def ended() -> bool:
        asked.append(None)
        return len(asked) == 2

    trained = loaded(tmp_path / "tiny", native=False)
    with pytest.raises(Closed):
        score(trained, TEXT, ended)
    assert len(asked) == 2, "the rest is not read"
