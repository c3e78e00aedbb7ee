"""Owners share a server: however much one of them asks for, the others have rows, turns and places to wait."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from serving.engines import Told, running, tiny
from serving.request_draws import ENDLESS, PATH
from serving.servers import served, until

from lmlong.inference.sampling import Sampling
from lmlong.serving.engine import PIECE, Busy, Engine
from lmlong.serving.fair_queue import FairQueue
from lmlong.serving.request import Request


def endless(owner: str) -> Request:
    return Request("abc", Sampling(temperature=0), max_tokens=None, owner=owner)


@contextmanager
def at_once(engine: Engine) -> Iterator[None]:
    """Let the engine see nothing of what is asked for until all is."""
    with engine._changed:
        yield


def test_owners_take_turns_and_keep_their_order() -> None:
    queue = FairQueue[int]()
    for owner, item in [("a", 1), ("a", 2), ("a", 3), ("b", 4), ("c", 5), ("b", 6)]:
        queue.put(owner, item)
    assert (len(queue), queue.of("a"), queue.of("d")) == (6, 3, 0)
    assert queue.remove(lambda item: item == 5) == 1 and queue.remove(lambda item: item == 5) == 0
    assert sorted(queue) == [1, 2, 3, 4, 6]
    assert [queue.take(queue.next_owner()) for _ in range(5)] == [1, 4, 2, 6, 3] and not queue


def test_the_owner_with_the_least_load_is_next() -> None:
    queue = FairQueue[int]()
    for owner, item in [("a", 1), ("b", 2), ("b", 3), ("c", 4)]:
        queue.put(owner, item)
    load = {"a": 2, "b": 1}
    assert queue.take(queue.next_owner(load)) == 4
    assert queue.take(queue.next_owner(load)) == 2
    assert queue.take(queue.next_owner({"a": 1, "b": 1})) == 1, "of equals, the one that waits longer"


def test_another_owner_has_a_row_at_once() -> None:
    with running(tiny(), rows=4, owners=2) as engine:
        greedy = [Told(engine, endless("a")) for _ in range(9)]
        greedy[0].next()
        until(lambda: engine.active == 3)
        assert Told(engine, Request("abc", max_tokens=3, owner="b")).all()[-1].end == "max_tokens"
        until(lambda: (engine.active, engine.queued) == (3, 6))
        for told in greedy:
            engine.cancel(told.writer)


def test_rows_that_become_free_go_to_the_owner_that_has_fewest() -> None:
    with running(tiny(), rows=5, owners=2) as engine:
        first = [Told(engine, endless("a")) for _ in range(9)]
        until(lambda: engine.active == 4)
        with at_once(engine):
            second = [Told(engine, endless("b")) for _ in range(9)]
            for told in first[:4]:
                engine.cancel(told.writer)
        for told in (*first[4:6], *second[:2]):
            told.next()
        until(lambda: engine.active == 4)
        assert all(told.none_are_left() for told in (*first[6:], *second[2:]))
        for told in (*first, *second):
            engine.cancel(told.writer)


def test_prompts_are_read_by_turns_of_their_owners() -> None:
    ended: list[str] = []
    with running(tiny(), rows=16, owners=2) as engine:
        with at_once(engine):
            many = Request("a" * 4 * PIECE, max_tokens=0, owner="many")
            one = Request("a" * 10 * PIECE, max_tokens=0, owner="one")
            for request in [many] * 8 + [one]:
                engine.submit(request, lambda _, owner=request.owner: ended.append(owner))  # type: ignore[misc]
        until(lambda: len(ended) == 9)
    assert ended[0] == "one", "it waits for as many pieces of the others as it has itself"


def test_a_full_queue_has_places_for_another_owner() -> None:
    with running(tiny(), rows=1, waiting=4, owners=2) as engine:
        told = [Told(engine, endless("a"))]
        told[0].next()
        told += [Told(engine, endless("a")) for _ in range(4)]
        with pytest.raises(Busy):
            Told(engine, endless("a"))
        told += [Told(engine, endless("b")) for _ in range(2)]
        for owner in ("a", "b"):
            with pytest.raises(Busy, match="4 requests are queued"):
                Told(engine, endless(owner))
        for one in told:
            engine.cancel(one.writer)


def test_one_key_does_not_make_another_wait() -> None:
    with ExitStack() as streams, served(tiny(), keys=["a", "b"], rows=2, max_tokens=10**6, lag=1 << 40) as server:
        mine, yours = ({"Authorization": f"Bearer {key}"} for key in "ab")
        for _ in range(3):
            streams.enter_context(server.client.stream("POST", PATH, json=ENDLESS, headers=mine))
        answer = server.client.post(PATH, json={"prompt": "a", "max_tokens": 2}, headers=yours)
        assert answer.status_code == 200
        until(lambda: (server.service.engine.active, server.service.engine.queued) == (1, 2))
