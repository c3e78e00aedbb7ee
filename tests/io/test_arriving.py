"""Bytes come as soon as they are there, from pipes and from files that grow, are moved, cut or gone."""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmlong.io.arriving import QUIET, arriving, follow


def test_a_pipe_gives_what_is_there_and_tells_once_that_it_is_quiet() -> None:
    reader, writer = os.pipe()
    found = arriving(reader, 0.05)
    os.write(writer, b"one")
    assert next(found) == b"one"
    assert next(found) == QUIET
    threading.Timer(0.3, os.write, (writer, b"two")).start()
    assert next(found) == b"two"  # and no second QUIET before it
    os.close(writer)
    assert [*found] == []
    os.close(reader)


def test_without_a_time_nothing_is_told_of_quiet() -> None:
    reader, writer = os.pipe()
    threading.Timer(0.3, os.close, (writer,)).start()
    os.write(writer, b"one")
    assert [*arriving(reader, None)] == [b"one"]
    os.close(reader)


@pytest.fixture
def followed(tmp_path: Path) -> Iterator[tuple[Path, Iterator[bytes]]]:
    path = tmp_path / "app.log"
    path.write_bytes(b"first\n")
    yield path, follow(path, None, poll=0.01)


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def test_what_is_appended_follows(followed: tuple[Path, Iterator[bytes]]) -> None:
    path, found = followed
    assert next(found) == b"first\n"
    append(path, b"second\n")
    assert next(found) == b"second\n"


def test_a_file_that_is_replaced_is_read_to_its_end_first(followed: tuple[Path, Iterator[bytes]]) -> None:
    path, found = followed
    assert next(found) == b"first\n"
    append(path, b"last of the old\n")
    path.rename(path.with_name("app.log.1"))
    path.write_bytes(b"first of the new\n")
    append(path.with_name("app.log.1"), b"after the move\n")
    both = next(found)
    while b"new" not in both:
        both += next(found)
    assert both == b"last of the old\nafter the move\nfirst of the new\n"


def test_a_file_that_is_cut_is_read_from_its_beginning(followed: tuple[Path, Iterator[bytes]]) -> None:
    path, found = followed
    assert next(found) == b"first\n"
    path.write_bytes(b"new\n")
    assert next(found) == b"new\n"


def test_a_file_that_is_gone_is_waited_for(followed: tuple[Path, Iterator[bytes]]) -> None:
    path, found = followed
    assert next(found) == b"first\n"
    path.unlink()
    threading.Timer(0.2, path.write_bytes, (b"back\n",)).start()
    assert next(found) == b"back\n"


def test_a_followed_file_tells_once_that_it_is_quiet(tmp_path: Path) -> None:
    path = tmp_path / "app.log"
    path.write_bytes(b"first\n")
    found = follow(path, 0.05, poll=0.01)
    assert [next(found), next(found)] == [b"first\n", QUIET]
    begun = time.monotonic()
    threading.Timer(0.3, append, (path, b"second\n")).start()
    assert next(found) == b"second\n" and time.monotonic() - begun > 0.2
