"""A run killed without warning, at whatever moment, goes on to the same losses and weights, to the last bit."""

import random
import time
from pathlib import Path

import pytest

from lmlong.checkpoint import read
from lmlong.io.files import sha256

from .conftest import lmlong, losses, metrics

STEPS, KILLS = 40, 4


def train(recipe: Path, run: Path, precision: str, kill_after: float | None = None) -> int:
    """Train to the end, or kill the child so long after its first new step."""
    child = lmlong(
        *("train", recipe, f"training.steps={STEPS}", "training.accumulate=2", "training.batch_size=2"),
        *(f"training.precision={precision}", "training.validate_every=5", "training.checkpoint_every=3"),
        *("model.dropout=0.1", "--out", run, "--resume", "auto"),
    )
    if kill_after is not None:
        before = len(metrics(run))
        while len(metrics(run)) in (0, before) and child.poll() is None:
            time.sleep(0.002)
        time.sleep(kill_after)
        child.kill()
    _, errors = child.communicate(timeout=120)
    assert child.returncode in (0, -9), errors
    return child.returncode


def outcome(run: Path) -> tuple[list, str]:
    """The losses of all steps, and the weights' hash."""
    return losses(run), sha256(read.find(run) / "model.safetensors")


@pytest.mark.parametrize("precision", ["32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_a_run_killed_time_and_again_is_the_run_that_was_not(tiny: Path, tmp_path: Path, precision: str) -> None:
    assert train(tiny, tmp_path / "whole", precision) == 0
    draw, killed = random.Random(precision), 0
    run = tmp_path / "cut"
    for _ in range(KILLS):  # a step takes some milliseconds, a save or a validation a few times that
        killed += train(tiny, run, precision, kill_after=draw.random() * 0.15) == -9
    assert killed >= 2
    assert train(tiny, run, precision) == 0
    assert outcome(run) == outcome(tmp_path / "whole")
    assert not list((run / "checkpoints").glob(".*"))
