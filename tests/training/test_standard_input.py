"""Text that comes through a pipe is trained on like a file: more than once, and by a later run."""

import json
import os
import pty
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from commands import Finished
from commands import lmlong as command
from machine import new_cache

from .conftest import logged_steps, losses

PIPED = "text.sources=[{kind: files, paths: ['-']}]"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LMLONG_CACHE", str(new_cache(tmp_path)))
    return tmp_path / "cache"


@contextmanager
def standard_input(descriptor: int) -> Iterator[None]:
    """Let a file be the standard input of this process."""
    before = os.dup(0)
    os.dup2(descriptor, 0)
    try:
        yield
    finally:
        os.dup2(before, 0)
        os.close(before)


def piped(text: bytes, *words: object, cwd: Path | None = None) -> Finished:
    """Run a command with a text in the pipe that is its standard input."""
    reader, writer = os.pipe()
    with os.fdopen(reader) as source:
        with os.fdopen(writer, "wb") as sink:
            sink.write(text)  # less than a pipe holds
        with standard_input(source.fileno()):
            return command(*words, cwd=cwd)


def table(output: str) -> list[str]:
    """What was measured, without the time that it took and the name of the text."""
    return [line for line in output.splitlines() if "tokens read" not in line and "  text: " not in line]


def test_pipe_is_trained_on_like_a_file_and_resumed(tiny: Path, four_steps: Path, tmp_path: Path) -> None:
    run, book = tmp_path / "pipe", tiny.with_name("book.txt")
    done = piped(book.read_bytes(), "train", tiny, PIPED, "training.steps=4", "--out", run)
    assert done.returncode == 0 and "standard input: " in done.stderr, done.stderr
    assert losses(run) == losses(four_steps)
    more = command("train", run / "recipe.yaml", "training.steps=6", "--resume", "auto", "--out", run)
    assert more.returncode == 0 and logged_steps(run)[-1] == 6, more.stderr
    words = [run, "--lengths", "8", "--min-documents", "1", "--by", "position", "--data"]
    file, pipe = command("eval", *words, book), piped(book.read_bytes(), "eval", *words, "-")
    assert file.returncode == 0 and table(file.stdout) == table(pipe.stdout), pipe.stderr


def test_suffix_names_the_format_and_a_folder_makes_it_a_file(tmp_path: Path) -> None:
    lines = "".join(json.dumps({"text": text, "title": text.upper()}) + "\n" for text in ("one", "two"))
    shown = piped(lines.encode(), "data", "show", "--json", "--", "-.jsonl")
    assert [json.loads(line)["title"] for line in shown.stdout.splitlines()] == ["ONE", "TWO"], shown.stderr
    (tmp_path / "-").write_text("a file")
    assert piped(b"a pipe", "data", "show", "./-", cwd=tmp_path).stdout == "a file\n"


def test_empty_broken_and_typed_input_is_refused(own_cache: Path) -> None:
    ours, terminal = pty.openpty()
    with standard_input(terminal):
        asked = command("data", "show", "-")
    os.close(ours)
    os.close(terminal)
    empty = piped(b"", "data", "show", "-")
    broken = piped(b"no record\n", "data", "show", "--", "-.jsonl")
    told = {"is a terminal": asked, "standard input is empty": empty, "cannot read it": broken}
    assert all(done.returncode == 2 and message in done.stderr for message, done in told.items())
    assert "Traceback" not in broken.stderr and len(list(own_cache.glob("input/*"))) == 1, "of the broken one"


def test_only_unfinished_copies_are_removed(own_cache: Path) -> None:
    (own_cache / "input").mkdir(parents=True)
    for name in ("unfinished-123", "unfinished-novel"):
        (own_cache / "input" / name).write_text("text")
        os.utime(own_cache / "input" / name, (1, 1))
    assert piped(b"a pipe", "data", "show", "-").stdout == "a pipe\n"
    assert [path.name for path in (own_cache / "input").glob("unfinished-*")] == ["unfinished-novel"]
