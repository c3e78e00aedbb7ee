"""A run that is killed or stopped, at whatever moment, resumes to the same losses and weights, to the last bit."""

import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from lmlong.checkpoint import read
from lmlong.training.run import train

from .conftest import Recipes, equal, lmlong, logged_steps, metrics

STEPS = 60


def options(precision: str) -> list[str]:
    return [
        *(f"training.steps={STEPS}", "training.accumulate=2", "training.batch_size=2", "model.dropout=0.1"),
        *(f"training.precision={precision}", "training.validate_every=5", "training.checkpoint_every=3"),
    ]


def resume(recipe: Path, run: Path, *options: str) -> subprocess.Popen[str]:
    """Continue a run in a process of its own, until it has logged a new step."""
    child = lmlong("train", recipe, *options, "--out", run, "--resume", "auto")
    before = len(metrics(run))
    while len(metrics(run)) in (0, before):
        time.sleep(0.002)
        assert child.poll() is None, child.communicate()
    return child


@pytest.mark.parametrize(
    ("precision", "kills", "number"),
    [("32", 1, signal.SIGINT), pytest.param("bf16", 3, signal.SIGTERM, marks=pytest.mark.slow)],
)
def test_a_run_that_is_killed_and_stopped_is_the_run_that_was_not(
    tiny: Path, recipe_of: Recipes, tmp_path: Path, precision: str, kills: int, number: signal.Signals
) -> None:
    run, draw = tmp_path / "cut", random.Random(precision)
    for _ in range(kills):  # a step takes some milliseconds, a save or a validation a few times that
        child = resume(tiny, run, *options(precision))
        time.sleep(draw.random() * 0.05)
        child.kill()
        child.communicate()
        assert child.returncode == -signal.SIGKILL and logged_steps(run)[-1] < STEPS

    child = resume(tiny, run, *options(precision))
    child.send_signal(number)
    output, errors = child.communicate(timeout=60)
    assert child.returncode == 128 + number and "Traceback" not in errors, errors
    reached = logged_steps(run)[-1]
    assert f"stopped after step {reached}" in output and reached < STEPS
    assert read.find(run).name == f"step-{reached:08d}"

    recipe = recipe_of(*options(precision))
    train(recipe, run, resume="auto")
    train(recipe, tmp_path / "whole")
    assert equal(run, tmp_path / "whole")
    assert not list((run / "checkpoints").glob(".*"))
