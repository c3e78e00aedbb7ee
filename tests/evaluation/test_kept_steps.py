"""What was read before an evaluation was killed is not read again, and no result depends on the kill."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import lmlong
from lmlong.evaluation import scorer
from lmlong.evaluation.kept_steps import KeptSteps
from lmlong.evaluation.perplexity_report import to_json
from lmlong.model.language_model import LanguageModel

VIEWS = ("context", "recurrence", "position", "protocol")

GROUP = 1024
"""Tokens that are read together."""


def numbers(run: Path, files: Path | None, **options: Any) -> Any:
    """Return the results of an evaluation without its times."""
    settings = {"lengths": [64, 128], "views": VIEWS, "min_documents": 1} | options
    (of_run,) = to_json([lmlong.evaluate(run, files, **settings)])["runs"]
    for part in (of_run, *of_run["context"]):
        del part["seconds"]
    del of_run["peak_bytes"]
    return of_run


def steps_files() -> list[Path]:
    return list((Path(os.environ["LMLONG_CACHE"]) / "evaluations").glob("*"))


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Documents that are read in several groups."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(9):
        (folder / f"{number:02}.txt").write_text(f"{number} bottles of ale on the wall, {number * 7} more. " * 15)
    return folder


def test_an_evaluation_that_was_killed_continues_to_the_same_numbers(
    run: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes a process, which is killed in the third pass."""
    monkeypatch.setattr(scorer, "TOKENS_AT_ONCE", GROUP)
    settings = {"lengths": [64, 128], "views": VIEWS, "min_documents": 1, "resume_as": "x"}
    code = f"""
import torch, lmlong
from lmlong.evaluation import scorer
torch.set_num_threads(1)
scorer.TOKENS_AT_ONCE = {GROUP}
lmlong.evaluate({str(run)!r}, {str(texts)!r}, **{settings!r})
"""
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE) as child:
        while child.poll() is None and not (steps_files() and b"carried 1" in steps_files()[0].read_bytes()):
            time.sleep(0.005)
        child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL, child.stderr and child.stderr.read()
    (file,) = steps_files()

    reads = _count_reads(monkeypatch)
    whole = numbers(run, texts)
    of_whole = reads.pop()
    file.write_bytes(file.read_bytes()[:-5])  # as if it was killed while it wrote
    assert numbers(run, texts, resume_as="x") == whole
    assert reads.pop() < of_whole and not steps_files()


def _count_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that counts the calls of the model."""
    counts = [0]
    score = LanguageModel.score

    def counted(self: LanguageModel, *inputs: Any) -> Any:
        if not counts:
            counts.append(0)
        counts[-1] += 1
        return score(self, *inputs)

    monkeypatch.setattr(LanguageModel, "score", counted)
    return counts


class Stopped(Exception):
    pass


@pytest.mark.parametrize(
    "change",
    [
        {"targets": 300},
        {"views": ("context",)},
        {"lengths": [64]},
        {"resume_as": "y"},
        {"precision": "bf16"},
        {"tokens": 500},
    ],
)
def test_other_arguments_do_not_continue_it(run: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]) -> None:
    options = {"resume_as": "x"}
    with monkeypatch.context() as patch:
        patch.setattr(scorer.Scorer, "sums", lambda *_, **__: (_ for _ in ()).throw(Stopped))
        with pytest.raises(Stopped):
            numbers(run, None, **options)
    (file,) = steps_files()
    expected = numbers(run, None, **{**options, **change, "resume_as": None})
    assert numbers(run, None, **{**options, **change}) == expected
    assert steps_files() == [file]


def kept(*content: object) -> KeptSteps:
    return KeptSteps("evaluations", *content)


def fail() -> None:
    pytest.fail("computed again")


def test_results_are_kept_to_the_bit_until_the_work_ends(run: Path) -> None:
    values = [0.1 + 0.2, 1e-320, -0.0, 12345678901234567, "é"]
    assert kept("a").get("one", lambda: values) == values
    again = kept("a")
    assert again.resumed and repr(again.get("one", fail)) == repr(values) and not again.resumed
    again.finish()
    assert not kept("a").resumed


def test_nothing_is_written_without_content(run: Path) -> None:
    steps = KeptSteps()
    assert steps.get("one", lambda: 1) == 1 and not steps.resumed
    steps.finish()
    assert not steps_files()


@pytest.mark.parametrize("at", [0, 3, 20, 90])
def test_lines_from_the_first_that_is_damaged_are_computed_again(run: Path, at: int) -> None:
    steps = kept("a")
    for number in range(3):
        steps.get(str(number), lambda: ["x" * 40])
    (file,) = steps_files()
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)
    steps, first = kept("a"), at // (len(data) // 3)
    for number in range(first):
        assert steps.get(str(number), fail) == ["x" * 40]
    assert not steps.resumed
    assert steps.get("new", lambda: 1) == 1
    assert kept("a").get("new", fail) == 1


def test_a_file_of_other_work_is_not_read(run: Path) -> None:
    kept("a").get("one", lambda: 1)
    (file,) = steps_files()
    kept("b").get("one", lambda: 2)
    (other,) = set(steps_files()) - {file}
    file.replace(other)
    assert not kept("b").resumed
    other.write_bytes(os.urandom(1000))
    assert not kept("b").resumed


def test_a_cache_that_cannot_be_written_stops_nothing(users_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    users_folder.chmod(0o500)
    monkeypatch.setenv("LMLONG_CACHE", str(users_folder / "cache"))
    assert kept("a").get("one", lambda: 1) == 1


def test_what_nobody_continued_is_removed(run: Path) -> None:
    kept("a").get("one", lambda: 1)
    (file,) = steps_files()
    mine = file.with_name("my first.steps")
    mine.write_text("mine")
    for path in (file, mine):
        os.utime(path, (1, 1))
    kept("b")
    assert steps_files() == [mine]
