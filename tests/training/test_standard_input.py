"""Text that comes through a pipe is trained on like a file: more than once, by all processes, and on another day."""

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import lmlong as call_lmlong

from lmlong.recipe import Recipe
from lmlong.training.run import train

from .conftest import lmlong, losses

COMMAND = [sys.executable, "-m", "lmlong"]
PIPED = "text.sources=[{kind: files, paths: ['-']}]"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LMLONG_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def book(tiny: Path) -> Path:
    return next(tiny.parent.glob("*.txt"))


def told(*arguments: object, input: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    """Run a command that is given a text, or nothing at all, by standard input."""
    command = [*COMMAND, *map(str, arguments)]
    given = {"stdin": subprocess.DEVNULL} if input is None else {"input": input}
    return subprocess.run(command, capture_output=True, timeout=120, **given)  # type: ignore[call-overload]


def table(output: str) -> list[str]:
    """What was measured, without the time that it took."""
    return [line for line in output.splitlines() if "tokens read" not in line]


def test_a_run_learns_from_a_pipe_as_from_a_file_and_goes_on_without_it(
    recipe_of: Callable[..., Recipe], tiny: Path, book: Path, tmp_path: Path
) -> None:
    train(recipe_of("training.steps=4"), tmp_path / "file")
    done = told("train", tiny, PIPED, "training.steps=4", "--out", tmp_path / "pipe", input=book.read_bytes())
    assert done.returncode == 0 and b"standard input: " in done.stderr, done.stderr.decode()
    assert losses(tmp_path / "pipe") == losses(tmp_path / "file")
    run = tmp_path / "pipe"
    more = call_lmlong("train", run / "recipe.yaml", "training.steps=6", "--resume", "auto", "--out", run)
    assert more.returncode == 0, more.stderr
    assert losses(run)[-1][0] == 6
    words = [run, "--lengths", "8", "--min-documents", "1", "--by", "position", "--data"]
    file, pipe = call_lmlong("eval", *words, book), told("eval", *words, "-", input=book.read_bytes())
    assert file.returncode == 0 and table(file.stdout) == table(pipe.stdout.decode()), pipe.stderr.decode()


def test_two_processes_learn_from_one_pipe(tiny: Path, book: Path, tmp_path: Path) -> None:
    options = [PIPED, "devices=2", "training.steps=4", "--out", tmp_path / "run"]
    with book.open() as text, subprocess.Popen(["cat"], stdin=text, stdout=subprocess.PIPE) as pipe:
        child = lmlong("train", tiny, *options, stdin=pipe.stdout)
        _, errors = child.communicate(timeout=120)
    assert child.returncode == 0, errors
    assert errors.count("standard input: ") == 1
    assert losses(tmp_path / "run")[-1][0] == 4


def test_a_suffix_says_what_comes() -> None:
    lines = "".join(json.dumps({"text": text, "title": text.upper()}) + "\n" for text in ("one", "two"))
    shown = told("data", "show", "--json", "--", "-.jsonl", input=lines.encode())
    assert [json.loads(line)["title"] for line in shown.stdout.splitlines()] == ["ONE", "TWO"], shown.stderr.decode()
    wrong = told("data", "show", "--", "-.jsonl", input=b"no record\n")
    assert wrong.returncode == 2 and b"cannot read it" in wrong.stderr and b"Traceback" not in wrong.stderr


def test_where_nothing_comes_it_is_told(cache: Path) -> None:
    empty = told("data", "show", "-")
    assert empty.returncode == 2 and b"standard input is empty" in empty.stderr
    master, terminal = pty.openpty()
    asked = subprocess.run([*COMMAND, "data", "show", "-"], stdin=terminal, capture_output=True, timeout=60)
    os.close(master)
    assert asked.returncode == 2 and b"standard input is a terminal" in asked.stderr
    assert not list(cache.glob("input/*"))


def test_a_file_of_that_name_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "-").write_text("a file")
    shown = subprocess.run([*COMMAND, "data", "show", "./-"], cwd=tmp_path, input=b"a pipe", capture_output=True)
    assert shown.stdout == b"a file\n"
