"""A run stopped by a signal, in a process of its own, goes on to what it would have been."""

import signal
import time
from pathlib import Path

import pytest

from lmlong.checkpoint import read

from .conftest import equal, lmlong, metrics

STEPS = 60


def train(recipe: Path, run: Path, *options: str) -> tuple[int, str]:
    child = lmlong("train", recipe, f"training.steps={STEPS}", "--out", run, *options)
    _, errors = child.communicate(timeout=120)
    return child.returncode, errors


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_a_signal_saves_and_the_run_goes_on_to_the_same_bit(
    tiny: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    assert train(tiny, tmp_path / "whole")[0] == 0
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

    assert train(tiny, run, "--resume", "auto")[0] == 0
    assert equal(run, tmp_path / "whole")
