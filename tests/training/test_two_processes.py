"""Two processes that train one model are the same run as one with their batches together, and stop together."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from lmlong.training.run import train

from .conftest import Recipes, equal, lmlong, logged_steps, losses, metrics, train_in_processes

TWO = ("devices=2", "training.batch_size=2", "training.steps=40", "training.checkpoint_every=7")
PIPED = "text.sources=[{kind: files, paths: ['-']}]"


def stop_two(recipe: Path, run: Path, to_all: bool, *options: str, **more: object) -> str:
    """Resume a run, and end it by a signal soon after its next step; its messages."""
    child = lmlong("train", recipe, *TWO, *options, "--out", run, "--resume", "auto", start_new_session=True, **more)
    before = len(metrics(run))
    while len(metrics(run)) in (0, before) and child.poll() is None:
        time.sleep(0.002)
    (os.killpg if to_all else os.kill)(child.pid, signal.SIGTERM)
    output, errors = child.communicate(timeout=60)
    assert child.returncode == 143, errors
    assert output.count("stopped after step") == 1 and "Traceback" not in errors
    assert 0 < len(losses(run)) < 40
    return errors


def test_two_processes_learn_what_one_does_and_resume_after_a_signal(
    tiny: Path, tmp_path: Path, recipe_of: Recipes
) -> None:
    """They first read their text from a pipe, which both of them need."""
    two, one = tmp_path / "two", tmp_path / "one"
    with (tmp_path / "book.txt").open() as text, subprocess.Popen(["cat"], stdin=text, stdout=subprocess.PIPE) as pipe:
        errors = stop_two(tiny, two, False, PIPED, stdin=pipe.stdout)
    assert errors.count("standard input: ") == 1
    train_in_processes(tiny, two, *TWO, "--resume", "auto")
    train(recipe_of("training.batch_size=4", "training.steps=40"), one)
    assert logged_steps(two) == logged_steps(one) == list(range(1, 41))
    assert losses(two) == pytest.approx(losses(one), rel=1e-4)
    scored = [[line["validation"]["tokens"] for line in metrics(run) if "validation" in line] for run in (one, two)]
    assert scored[0] == scored[1]


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["training.state_passing=0.5"]], ids=["plain", "states passed on"])
def test_two_processes_resume_to_the_same_bit(tiny: Path, tmp_path: Path, options: list[str]) -> None:
    """After a signal to all, as a terminal or a scheduler sends it, and after one to the first, as `kill PID` does."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train_in_processes(tiny, whole, *TWO, *options)
    for to_all in (True, False):
        stop_two(tiny, cut, to_all, *options)
    train_in_processes(tiny, cut, *TWO, "--resume", "auto", *options)
    assert equal(cut, whole)


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
