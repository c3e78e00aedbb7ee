"""A run killed without warning, at whatever moment, goes on to the same losses and weights, to the last bit."""

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lmlong.checkpoint import read
from lmlong.io.files import sha256
from lmlong.recipe import Recipe
from lmlong.training.run import train

from .conftest import lmlong, losses, metrics

STEPS, KILLS = 40, 4


def options(precision: str) -> list[str]:
    return [
        *(f"training.steps={STEPS}", "training.accumulate=2", "training.batch_size=2", "model.dropout=0.1"),
        *(f"training.precision={precision}", "training.validate_every=5", "training.checkpoint_every=3"),
    ]


def train_and_kill(recipe: Path, run: Path, precision: str, seconds: float) -> int:
    """Train in a process of its own, kill it so long after its first new step, and return its exit code."""
    child = lmlong("train", recipe, *options(precision), "--out", run, "--resume", "auto")
    before = len(metrics(run))
    while len(metrics(run)) in (0, before) and child.poll() is None:
        time.sleep(0.002)
    time.sleep(seconds)
    child.kill()
    _, errors = child.communicate(timeout=120)
    assert child.returncode in (0, -9), errors
    return child.returncode


def outcome(run: Path) -> tuple[list, str]:
    """The losses of all steps, and the weights' hash."""
    return losses(run), sha256(read.find(run) / "model.safetensors")


@pytest.mark.parametrize("precision", ["32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_a_run_killed_time_and_again_is_the_run_that_was_not(
    tiny: Path, recipe_of: Callable[..., Recipe], tmp_path: Path, precision: str
) -> None:
    recipe = recipe_of(*options(precision))
    train(recipe, tmp_path / "whole")
    draw, killed = random.Random(precision), 0
    run = tmp_path / "cut"
    for _ in range(KILLS):  # a step takes some milliseconds, a save or a validation a few times that
        killed += train_and_kill(tiny, run, precision, draw.random() * 0.15) == -9
    assert killed >= 2
    train(recipe, run, resume="auto")
    assert outcome(run) == outcome(tmp_path / "whole")
    assert not list((run / "checkpoints").glob(".*"))
