"""A server takes the memory of what goes on, and of nothing that has ended."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from serving.request_draws import ENDLESS, PATH
from serving.schedulers import tiny
from serving.servers import Served, served, until

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
                until(lambda: server.service.scheduler.active == 0)
                until(lambda: writers() == 0)
