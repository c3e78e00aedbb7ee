"""Runs that end by time: their schedule, and what is left of the time after a kill."""

import math
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lmlong.checkpoint import read
from lmlong.cli.after_training import after_training
from lmlong.recipe import Training
from lmlong.training.loader import Loader
from lmlong.training.optimizer import ENDLESS, count_steps, learning_rate_factor
from lmlong.training.progress import CLOCKS, TrainingClock
from lmlong.training.run import train

from .conftest import Recipes, lmlong, metrics

BY_TIME = ("training.steps=null", "training.validate_every=100000", "training.checkpoint_every=1")


def seconds(run: Path) -> float:
    return read.read_training(read.find(run))["seconds"]


def rates(run: Path) -> list[float]:
    return [line["learning_rate"] for line in metrics(run) if "loss" in line]


def clock(minutes: float | None, seconds: float, steps: int = ENDLESS) -> TrainingClock:
    found = TrainingClock(Training(steps=steps, minutes=minutes), steps)
    found.seconds = seconds
    return found


def test_the_steps_that_fit_are_expected_by_the_mean_time_so_far() -> None:
    assert clock(None, 30.0, 7).expected_steps(3) == 7
    assert clock(1.0, 0.0).expected_steps(0) == ENDLESS, "nothing is known yet"
    assert clock(1.0, 15.0).expected_steps(99) == 400
    assert clock(1.0, 15.0, steps=300).expected_steps(99) == 300
    assert clock(1.0, 70.0).expected_steps(99) == 100
    assert [clock(1.0, spent).ends_at(5) for spent in (59.9, 60.0)] == [False, True]
    assert clock(1.0, 1.0, steps=5).ends_at(5)


def test_between_agreements_the_time_of_several_processes_stands_still() -> None:
    trainer: Any = SimpleNamespace(world_size=2, is_global_zero=True)
    trainer.strategy = SimpleNamespace(reduce=lambda number, reduce_op: number, root_device=torch.device("cpu"))
    ours = clock(1.0, 15.0)
    for _ in range(3):
        time.sleep(0.01)
        ours.step(trainer, agrees=False)
        assert ours.seconds == 15.0
    assert ours.expected_steps(102) == 400, "by the time at step 99"
    ours.step(trainer)
    assert 15.03 <= ours.seconds < 20
    assert ours.expected_steps(103) == math.ceil(104 * 60 / ours.seconds)


def test_the_learning_rate_is_that_of_a_run_of_as_many_steps() -> None:
    training = Training(minutes=1.0, warmup_steps=10)
    by_time = [learning_rate_factor(step, clock(1.0, 0.3 * step).expected_steps(step), training) for step in range(200)]
    by_steps = [learning_rate_factor(step, 200, training) for step in range(200)]
    assert by_time == pytest.approx(by_steps, abs=0.05)
    assert count_steps(training, 100, 1000) == ENDLESS


def test_a_run_ends_when_its_time_is_used_up_and_its_rate_has_fallen(recipe_of: Recipes, tmp_path: Path) -> None:
    train(recipe_of("training.steps=1"), tmp_path / "first")  # in which native code is loaded
    recipe = recipe_of(*BY_TIME, "training.minutes=0.02")
    result = train(recipe, tmp_path / "run")
    found = rates(tmp_path / "run")
    assert result.validation is not None and len(found) == result.step
    assert seconds(tmp_path / "run") >= 1.2
    assert found[-1] < 0.3 * max(found)
    again = train(recipe, tmp_path / "run", resume="auto")
    assert (again.step, again.validation) == (result.step, None)
    assert "Raise training.steps, tokens, epochs or minutes to continue." in after_training(again)


def test_whichever_comes_first_ends_it(recipe_of: Recipes, tmp_path: Path) -> None:
    assert train(recipe_of("training.minutes=60", "training.steps=3"), tmp_path / "run").step == 3


def test_a_run_resumed_has_only_the_time_that_is_left(recipe_of: Recipes, tmp_path: Path) -> None:
    train(recipe_of("training.minutes=0.01", "training.steps=5"), tmp_path / "run")
    before = seconds(tmp_path / "run")
    assert before > 0
    minutes = (before + 0.1) / 60
    result = train(recipe_of(*BY_TIME, f"training.minutes={minutes}"), tmp_path / "run", resume="auto")
    after = seconds(tmp_path / "run")
    assert after >= before + 0.1 and result.step > 5
    slowest = max(
        256 / line["tokens_per_second"]
        for line in metrics(tmp_path / "run")
        if line.get("step", 0) > 5 and "loss" in line
    )
    assert after <= before + 0.1 + 1.1 * slowest


@pytest.fixture
def slow_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches that 0.2 seconds are waited for."""
    batches = Loader.__iter__

    def waited_for(self: Loader) -> Any:
        for batch in batches(self):
            time.sleep(0.2)
            yield batch

    monkeypatch.setattr(Loader, "__iter__", waited_for)


@pytest.mark.usefixtures("slow_batches")
def test_waiting_takes_no_minutes_of_processor_time(
    recipe_of: Recipes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = ("training.minutes=0.01", "training.steps=5", "training.checkpoint_every=1", "training.log_every=5")
    assert train(recipe_of(*recipe), tmp_path / "wall").step <= 3
    assert "of processor time" not in capsys.readouterr().err
    assert train(recipe_of(*recipe, "training.clock=process"), tmp_path / "process").step == 5
    assert 0 < seconds(tmp_path / "process") < 0.6
    printed = capsys.readouterr().err
    assert "0.01 minutes of processor time or 5 steps" in printed
    assert re.search(r"step 5, \d+% of processor time: loss .* 00:00 of processor time left", printed)


def test_computation_takes_minutes_of_processor_time_divided_by_threads() -> None:
    trainer: Any = SimpleNamespace(world_size=1, is_global_zero=True)
    ours = TrainingClock(Training(minutes=1.0, clock="process"), ENDLESS)
    with ours.pause():
        compute()
    compute()
    ours.step(trainer)
    once, before = ours.seconds, torch.get_num_threads()
    assert 0.1 / before <= once < 0.2 / before, "without the pause"
    torch.set_num_threads(4 * before)
    try:
        ours = TrainingClock(Training(minutes=1.0, clock="process"), ENDLESS)
        compute()
        ours.step(trainer)
    finally:
        torch.set_num_threads(before)
    assert 0.1 / 4 / before <= ours.seconds < 0.1 / before


def compute() -> None:
    """Use a tenth of a second of processor time."""
    begun = time.process_time()
    while time.process_time() - begun < 0.1:
        pass


def test_a_step_that_only_waited_has_a_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CLOCKS, "process", lambda: 7.0)
    trainer: Any = SimpleNamespace(world_size=1, is_global_zero=True)
    ours = TrainingClock(Training(minutes=1.0, clock="process"), ENDLESS)
    assert ours.step(trainer) > 0


@pytest.mark.slow
def test_a_run_killed_ends_after_as_many_minutes_as_one_that_was_not(tiny: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = ("train", tiny, *BY_TIME, "training.minutes=0.15", "--out", run, "--resume", "auto")
    child = lmlong(*command)
    while len(metrics(run)) < 3 and child.poll() is None:
        time.sleep(0.002)
    child.kill()
    child.communicate(timeout=120)
    kept, before = read.read_training(read.find(run)), metrics(run)
    assert child.returncode == -9 and 0 < kept["seconds"] < 9
    child = lmlong(*command)
    _, errors = child.communicate(timeout=120)
    assert child.returncode == 0 and "of the time" in errors, errors
    last = [line["step"] for line in metrics(run) if "loss" in line]
    assert last == list(range(1, len(last) + 1)), "no step is missing, and none is there twice"
    assert metrics(run)[: kept["step"]] == before[: kept["step"]]
    after = read.read_training(read.find(run))
    mean = (after["seconds"] - kept["seconds"]) / (after["step"] - kept["step"])
    assert after["seconds"] >= 9 and (after["step"] - kept["step"] - 2) * mean < 9 - kept["seconds"]


@pytest.mark.slow
def test_the_first_of_two_processes_decides_for_both(tiny: Path, tmp_path: Path) -> None:
    child = lmlong("train", tiny, *BY_TIME, "training.minutes=0.02", "devices=2", "--out", tmp_path / "run")
    _, errors = child.communicate(timeout=120)
    assert child.returncode == 0, errors
    assert seconds(tmp_path / "run") >= 1.2
