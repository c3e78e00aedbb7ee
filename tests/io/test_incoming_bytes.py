"""Bytes come as soon as they are there, from pipes and from files that grow, are moved, cut or gone."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from lmlong.io.incoming_bytes import QUIET, FilePosition, follow_file, read_available


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    for end in (reader, writer):
        with suppress(OSError):
            os.close(end)


def test_pipe_yields_bytes_as_they_come_and_quiet_once(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    found = read_available(reader, 0.05)
    os.write(writer, b"one")
    assert [next(found), next(found)] == [b"one", QUIET]
    threading.Timer(0.15, os.write, (writer, b"two")).start()
    assert next(found) == b"two"  # and no second QUIET before it
    os.write(writer, b"three")
    found = read_available(reader, None)
    assert next(found) == b"three"
    threading.Timer(0.05, os.close, (writer,)).start()
    assert [*found] == [], "no QUIET without a time"


@pytest.fixture
def followed(tmp_path: Path) -> Iterator[tuple[Path, Iterator[bytes]]]:
    """A log whose first line has been read, and what comes after it."""
    path = tmp_path / "app.log"
    path.write_bytes(b"first\n")
    found = follow_file(path, None, poll=0.001)
    assert next(found) == b"first\n"
    yield path, found


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def test_replaced_file_is_read_to_its_end_first(followed: tuple[Path, Iterator[bytes]]) -> None:
    path, found = followed
    append(path, b"last of the old\n")
    path.rename(path.with_name("app.log.1"))
    path.write_bytes(b"first of the new\n")
    append(path.with_name("app.log.1"), b"after the move\n")
    both = next(found)
    while b"new" not in both:
        both += next(found)
    assert both == b"last of the old\nafter the move\nfirst of the new\n"


def test_truncated_file_is_read_and_missing_file_is_waited_for(followed: tuple[Path, Iterator[bytes]]) -> None:
    path, found = followed
    path.write_bytes(b"new\n")
    assert next(found) == b"new\n"
    path.unlink()
    threading.Timer(0.05, path.write_bytes, (b"back\n",)).start()
    assert next(found) == b"back\n"


def test_file_is_read_from_its_position(tmp_path: Path) -> None:
    path, position = tmp_path / "app.log", FilePosition()
    for line in (b"first\nsecond\n", b"third\n"):
        append(path, line)
        found = follow_file(path, None, poll=0.01, position=position)
        assert next(found) == line
        found.close()
    assert position.offset == 19 and bytes.fromhex(position.last) == path.read_bytes()


@pytest.mark.parametrize("data", [b"other\nsecond\nthird\n", b"cut\n", b""])
def test_another_file_is_read_from_its_beginning(tmp_path: Path, data: bytes) -> None:
    path, position = tmp_path / "app.log", FilePosition()
    path.write_bytes(b"first\nsecond\n")
    with path.open("rb", buffering=0) as file:
        file.read()
        position.note(file)
        assert position.seek(file) and file.tell() == 13
    path.write_bytes(data)  # keeps its number
    with path.open("rb", buffering=0) as file:
        assert not position.seek(file) and file.read() == data


def test_pipe_has_no_position(pipe: tuple[int, int]) -> None:
    position = FilePosition()
    with open(pipe[0], "rb", buffering=0, closefd=False) as file:
        position.note(file)  # type: ignore[arg-type]
        assert position == FilePosition() and not position.seek(file)  # type: ignore[arg-type]


class Interrupted(Exception):
    pass


def test_interrupted_wait_loses_nothing(pipe: tuple[int, int]) -> None:
    """What interrupts reaches waits alone, and what was there before it is told."""
    waits = 0

    @contextmanager
    def waiting() -> Iterator[None]:
        nonlocal waits
        waits += 1
        if waits == 3:
            raise Interrupted
        yield

    reader, writer = pipe
    os.write(writer, b"one")
    found = read_available(reader, 0.01, waiting)
    assert [next(found), next(found)] == [b"one", QUIET]
    os.write(writer, b"two")
    with pytest.raises(Interrupted):
        next(found)
    assert os.read(reader, 10) == b"two"


def test_file_moved_while_it_is_opened_is_waited_for(followed: tuple[Path, Iterator[bytes]]) -> None:
    path, found = followed

    def rotate() -> None:
        for _ in range(200):
            path.unlink(missing_ok=True)
            path.write_bytes(b"x\n")
        path.unlink()
        path.write_bytes(b"last\n")

    thread = threading.Thread(target=rotate)
    thread.start()
    seen = b""
    while not seen.endswith(b"last\n"):
        seen += next(found)
    thread.join()


def test_followed_file_yields_quiet_once(tmp_path: Path) -> None:
    path = tmp_path / "app.log"
    path.write_bytes(b"first\n")
    found = follow_file(path, 0.05, poll=0.01)
    assert [next(found), next(found)] == [b"first\n", QUIET]
    threading.Timer(0.15, append, (path, b"second\n")).start()
    assert next(found) == b"second\n"  # and no second QUIET before it
