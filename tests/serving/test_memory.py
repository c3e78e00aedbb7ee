"""A server takes the memory of what goes on, and of nothing that has ended."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from interop.exported import FORMS
from serving.engines import Told, loaded, running
from serving.request_draws import ENDLESS, PATH
from serving.servers import Served, served, until

from lmlong.serving.limits import Limits
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


def test_a_request_that_has_ended_leaves_nothing_to_collect(tmp_path: Path) -> None:
    with served(loaded(tmp_path / "run", **FORMS["ngram"]), limits=Limits(max_tokens=10**6)) as server:
        for ask in (
            lambda: server.texts(prompt=["a", "b"], n=2, max_tokens=3),
            lambda: server.events(PATH, prompt="a", max_tokens=3),
            lambda: leave(server),
        ):
            with without_collector():
                ask()
                until(lambda: server.service.engine.active == 0)
                until(lambda: writers() == 0)


@pytest.mark.skipif(sys.platform != "linux", reason="only the C library of Linux gives memory back")
def test_an_engine_at_rest_gives_free_memory_back(tmp_path: Path) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    with running(loaded(tmp_path / "run", **FORMS["elu"])) as engine:
        before = resident()
        blocks = [bytearray(50_000) for _ in range(4000)]
        assert resident() > before + 150e6
        kept = blocks[::100]  # so that nothing in between is the end of a heap
        del blocks
        assert resident() > before + 100e6, "it is free already"
        assert Told(engine, Request("a", max_tokens=2)).text() is not None
        until(lambda: resident() < before + 50e6)
        assert len(kept) == 40
