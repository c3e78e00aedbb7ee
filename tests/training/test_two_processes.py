"""Two processes that train one model are the same run as one with their batches together, and stop together."""

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lmlong.recipe import Recipe
from lmlong.training.run import train

from .conftest import equal, lmlong, losses, metrics

TWO = ("devices=2", "training.batch_size=2", "training.steps=40", "training.checkpoint_every=7")


def run_two(recipe: Path, run: Path, *options: str) -> tuple[int, str, str]:
    child = lmlong("train", recipe, *TWO, "--out", run, *options, start_new_session=True)
    output, errors = child.communicate(timeout=120)
    return child.returncode, output, errors


def stop_two(recipe: Path, run: Path, to_all: bool, draw: random.Random, *options: str) -> None:
    """Go on with a run, and end it by a signal soon after its next step."""
    child = lmlong("train", recipe, *TWO, *options, "--out", run, "--resume", "auto", start_new_session=True)
    before = len(metrics(run))
    while len(metrics(run)) in (0, before) and child.poll() is None:
        time.sleep(0.002)
    time.sleep(draw.random() * 0.05)
    (os.killpg if to_all else os.kill)(child.pid, signal.SIGTERM)
    output, errors = child.communicate(timeout=60)
    assert child.returncode == 143, errors
    assert output.count("stopped after step") == 1 and "Traceback" not in errors


@pytest.fixture
def whole(tiny: Path, tmp_path: Path) -> Path:
    code, output, errors = run_two(tiny, tmp_path / "whole")
    assert code == 0, errors
    assert output.count("validation ") == 1  # the second process is silent
    assert errors.count("parameters,") == 1
    return tmp_path / "whole"


def test_two_processes_learn_what_one_does_and_go_on_after_a_signal(
    whole: Path, tiny: Path, tmp_path: Path, recipe_of: Callable[..., Recipe]
) -> None:
    train(recipe_of("training.batch_size=4", "training.steps=40"), tmp_path / "one")
    one = losses(tmp_path / "one")
    assert [step for step, _ in losses(whole)] == [step for step, _ in one] == list(range(1, 41))
    assert [loss for _, loss in losses(whole)] == pytest.approx([loss for _, loss in one], rel=1e-4)
    sums = [
        [line["validation"]["tokens"] for line in metrics(run) if "validation" in line]
        for run in (whole, tmp_path / "one")
    ]
    assert sums[0] == sums[1]

    draw, run = random.Random(0), tmp_path / "cut"
    for to_all in (False, True):  # as `kill PID` does, then as a terminal or a scheduler does
        stop_two(tiny, run, to_all, draw)
    assert len(losses(run)) < 40
    code, _, errors = run_two(tiny, run, "--resume", "auto")
    assert code == 0, errors
    assert equal(run, whole)


@pytest.mark.slow
def test_states_passed_on_by_two_processes_go_on_after_a_signal(tiny: Path, tmp_path: Path) -> None:
    """Each has its own rows, and they read on from its own."""
    half, run = "training.state_passing=0.5", tmp_path / "cut"
    for folder in (tmp_path / "whole", run):
        if folder == run:
            stop_two(tiny, run, False, random.Random(0), half)
            assert 0 < len(losses(run)) < 40
        code, _, errors = run_two(tiny, folder, half, "--resume", "auto")
        assert code == 0, errors
    assert equal(run, tmp_path / "whole")


def test_whole_documents_of_unequal_lengths(tiny: Path, tmp_path: Path, recipe_of: Callable[..., Recipe]) -> None:
    """Each process has as many segments to run as the other, however long its own documents are."""
    draw = random.Random(1)
    lines = (tmp_path / "book.txt").read_text().splitlines()
    (tmp_path / "books").mkdir()
    for number in range(60):
        (tmp_path / "books" / f"{number}.txt").write_text("\n".join(draw.choices(lines, k=draw.choice([1, 2, 3, 12]))))
    options = [
        *("text.rows=documents", f"text.sources.0.paths=[{tmp_path / 'books'}]", "text.sequence_length=512"),
        *("training.segment=100", "training.steps=10", "text.validation.fraction=0.2"),
    ]
    code, _, errors = run_two(tiny, tmp_path / "two", *options)
    assert code == 0, errors
    train(recipe_of(*options, "training.batch_size=4"), tmp_path / "one")
    assert [loss for _, loss in losses(tmp_path / "two")] == pytest.approx(
        [loss for _, loss in losses(tmp_path / "one")], rel=1e-4
    )


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "deepspeed"])
def test_a_process_that_is_killed_is_named(tiny: Path, tmp_path: Path, strategy: str) -> None:
    run, options = tmp_path / "run", ("training.steps=100000", f"training.strategy={strategy}")
    child = lmlong("train", tiny, *TWO, *options, "--out", run, start_new_session=True)
    while not metrics(run) and child.poll() is None:
        time.sleep(0.05)
    (second,) = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
    os.kill(int(second), signal.SIGKILL)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 1 and "Traceback" not in errors, errors
    assert "error: rank 1 of 2 was killed by SIGKILL, as the system does when memory is short." in errors
