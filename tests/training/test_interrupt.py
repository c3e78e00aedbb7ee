"""A run stopped by a signal, in a process of its own, goes on to what it would have been."""

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lmlong.checkpoint import read
from lmlong.recipe import Recipe
from lmlong.training.run import train

from .conftest import equal, lmlong, metrics

STEPS = 60


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_a_signal_saves_and_the_run_goes_on_to_the_same_bit(
    tiny: Path, recipe_of: Callable[..., Recipe], tmp_path: Path, number: signal.Signals, code: int
) -> None:
    recipe = recipe_of(f"training.steps={STEPS}")
    train(recipe, tmp_path / "whole")
    run = tmp_path / "cut"
    child = lmlong("train", tiny, f"training.steps={STEPS}", "--out", run)
    while len(metrics(run)) < 10:
        time.sleep(0.005)
        assert child.poll() is None
    child.send_signal(number)
    output, errors = child.communicate(timeout=60)
    assert child.returncode == code, errors
    assert "Traceback" not in errors
    reached = metrics(run)[-1]["step"]
    assert 10 <= reached < STEPS
    assert f"stopped after step {reached}" in output
    assert read.find(run).name == f"step-{reached:08d}"

    train(recipe, run, resume="auto")
    assert equal(run, tmp_path / "whole")
