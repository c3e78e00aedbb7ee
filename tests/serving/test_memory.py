"""A server takes the memory of what goes on, and of nothing that has ended."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from serving.engines import Told, running, tiny
from serving.request_draws import ENDLESS, PATH
from serving.servers import Served, served, until

from lmlong.inference.sampling import Sampling
from lmlong.serving import free_memory
from lmlong.serving.free_memory import FreeMemory, resident
from lmlong.serving.request import Request
from lmlong.serving.writer import Writer


@contextmanager
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def writers() -> int:
    return sum(type(one) is Writer for one in gc.get_objects())


def leave(server: Served) -> None:
    """Go away while a text is written."""
    with server.client.stream("POST", PATH, json=ENDLESS) as stream:
        assert next(stream.iter_lines())


def test_a_request_that_has_ended_leaves_nothing_to_collect() -> None:
    with served(tiny("ngram", native=True), max_tokens=10**6) as server:
        for ask in (
            lambda: server.texts(prompt=["a", "b"], n=2, max_tokens=3),
            lambda: server.events(PATH, prompt="a", max_tokens=3),
            lambda: leave(server),
        ):
            with without_collector():
                ask()
                until(lambda: server.service.engine.active == 0)
                until(lambda: writers() == 0)


on_linux = pytest.mark.skipif(sys.platform != "linux", reason="only the C library of Linux gives memory back")


def holes() -> tuple[int, list[bytearray]]:
    """Take 300 MB, and leave them free but for what lies in between; what was resident before, and that."""
    FreeMemory().give_back()  # else the 300 MB might be some that are free already
    before, taken = resident(), [bytearray(50_000) for _ in range(6000)]
    assert resident() > before + 200e6
    return before, taken[::100]


@on_linux
@pytest.mark.parametrize("writes", [False, True])
def test_free_memory_is_given_back(monkeypatch: pytest.MonkeyPatch, writes: bool) -> None:
    monkeypatch.setattr(free_memory, "AT_LATEST", 0.3)
    with running(tiny(native=True)) as engine:
        told = Told(engine, Request("a", Sampling(temperature=0), max_tokens=None if writes else 2))
        assert told.next()
        before, kept = holes()
        until(lambda: resident() < before + 100e6)
        assert len(kept) == 60 and engine.active == writes
        engine.cancel(told.writer)


@on_linux
def test_it_is_given_back_when_there_is_much_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(free_memory, "EVERY", 0.0)
    free = FreeMemory()
    before, kept = holes()
    assert resident() > before + 200e6, "nobody has given it back yet"
    free.tidy()
    assert len(kept) == 60 and resident() < before + 100e6
