"""Long work is shown after some seconds, and at intervals; what cannot count its steps shows its time."""

import sys
import time

import pexpect
import pytest

from lmlong.report import progress
from lmlong.report.progress import Progress, each, waiting


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which the test sets."""
    now = [0.0]
    monkeypatch.setattr(progress, "FIRST", 2.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_slow_steps_are_shown_by_their_seconds(now: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    for now[0] in each((1.0, 5.0, 9.0, 16.0, 17.0), "models", 5, "models"):
        pass
    assert capsys.readouterr().err.splitlines() == [
        "models: 40% of 5 models, 2 s each, 00:07 left",
        "models: 80% of 5 models, 4 s each, 00:04 left",
    ]
    for now[0] in each((20.0, 50.0), "models", 2, "models", show=False):
        pass
    assert capsys.readouterr().err == "", "if it is not wanted"


def test_earlier_work_counts_as_done_but_not_for_the_speed(now: list[float]) -> None:
    with Progress("a", 1000, "tokens") as shown:
        now[0] = 5.0
        shown.skip(400)
        assert shown.line() == "a: 40% of 1,000 tokens, 0 tokens/s, ? left"
        now[0] = 10.0
        shown.update(100)
        assert shown.line() == "a: 50% of 1,000 tokens, 20 tokens/s, 00:25 left"
        shown.begin("b")
        shown.skip(100)
        assert shown.line() == "b: 60% of 1,000 tokens, 20 tokens/s, 00:20 left"


def test_the_first_hundredth_of_the_work_does_not_say_how_long_the_rest_takes(now: list[float]) -> None:
    with Progress("a", 1000, "tokens") as shown:
        for now[0], steps, left in ((9.0, 9, "?"), (10.0, 1, "16:30")):
            shown.update(steps)
            assert shown.line() == f"a: 1% of 1,000 tokens, 1 tokens/s, {left} left"


def test_work_without_steps_shows_its_time(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "FIRST", 0.01)
    with waiting("training the tokenizer"):
        time.sleep(0.1)
    assert capsys.readouterr().err == "training the tokenizer: 00:00 so far\n"
    monkeypatch.setattr(progress, "FIRST", 10.0)
    with pytest.raises(KeyError), waiting("this"):
        raise KeyError
    assert capsys.readouterr().err == ""


def test_a_terminal_shows_a_bar_with_the_time_left() -> None:
    """It takes a process on a terminal."""
    code = """
import time
from lmlong.report import progress
progress.FIRST = 0.05
for _ in progress.each(range(40), "reading", 40, "steps"):
    time.sleep(0.02)
"""
    child = pexpect.spawn(sys.executable, ["-c", code], encoding="utf-8", dimensions=(24, 80), timeout=30)
    child.expect(r"reading: +\d+%\|.*steps/s\]")
    child.expect(pexpect.EOF)
