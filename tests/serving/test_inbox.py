"""Events on their way to who waits for them."""

import asyncio

from lmlong.serving.inbox import Inbox
from lmlong.serving.request import Event


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
