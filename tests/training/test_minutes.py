"""The time of a run: when it validates and saves, when it ends, and what is left of its time after a kill."""

import math
import re
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lmlong.checkpoint import read
from lmlong.cli.after_training import after_training
from lmlong.recipe import Training
from lmlong.recipe import file as recipe_file
from lmlong.recipe.find import shipped_recipes
from lmlong.training.optimizer import ENDLESS, count_steps, learning_rate_factor
from lmlong.training.progress import CLOCKS, Intervals, TrainingClock
from lmlong.training.run import train

from .conftest import TICK, Recipes, metrics

BY_TIME = ("training.steps=null", "training.validate_every=100000", "training.checkpoint_every=1")


def seconds(run: Path) -> float:
    return read.read_training(read.find(run))["seconds"]


def rates(run: Path) -> list[float]:
    return [line["learning_rate"] for line in metrics(run) if "loss" in line]


def clock(minutes: float | None, seconds: float, steps: int = ENDLESS) -> TrainingClock:
    found = TrainingClock(Training(steps=steps, minutes=minutes), steps)
    found.seconds = seconds
    return found


def test_expected_steps_follow_the_mean_time() -> None:
    assert clock(None, 30.0, 7).expected_steps(3) == 7
    assert clock(1.0, 0.0).expected_steps(0) == ENDLESS, "nothing is known yet"
    assert clock(1.0, 15.0).expected_steps(99) == 400
    assert clock(1.0, 15.0, steps=300).expected_steps(99) == 300
    assert clock(1.0, 70.0).expected_steps(99) == 100
    assert [clock(1.0, spent).ends_at(5) for spent in (59.9, 60.0)] == [False, True]
    assert clock(1.0, 1.0, steps=5).ends_at(5)


def trainer_of(processes: int) -> Any:
    strategy = SimpleNamespace(reduce=lambda number, reduce_op: number, root_device=torch.device("cpu"))
    return SimpleNamespace(world_size=processes, is_global_zero=True, strategy=strategy)


def test_time_of_processes_advances_at_agreements() -> None:
    ours = clock(1.0, 15.0)
    for _ in range(3):
        time.sleep(0.01)
        ours.step(trainer_of(2), agrees=False)
        assert ours.seconds == 15.0
    assert ours.expected_steps(102) == 400, "by the time at step 99"
    ours.step(trainer_of(2))
    assert 15.03 <= ours.seconds < 20
    assert ours.expected_steps(103) == math.ceil(104 * 60 / ours.seconds)


def test_learning_rate_by_time_is_that_by_steps() -> None:
    training = Training(minutes=1.0, warmup_steps=10)
    by_time = [learning_rate_factor(step, clock(1.0, 0.3 * step).expected_steps(step), training) for step in range(200)]
    by_steps = [learning_rate_factor(step, 200, training) for step in range(200)]
    assert by_time == pytest.approx(by_steps, abs=0.05)
    assert count_steps(training, 100, 1000) == ENDLESS


@pytest.mark.usefixtures("ticking")
def test_run_ends_with_its_time(recipe_of: Recipes, tmp_path: Path) -> None:
    """The first step takes one tick, each other one two, whatever is validated and saved between them."""
    recipe = recipe_of(*BY_TIME, "training.minutes=0.1", "training.warmup_steps=2")
    result = train(recipe, tmp_path / "run")
    assert result.step == 31 and seconds(tmp_path / "run") == pytest.approx(31 * 2 * TICK - TICK)
    found = rates(tmp_path / "run")
    assert result.validation is not None and len(found) == result.step
    assert found[-1] < 0.3 * max(found)
    again = train(recipe, tmp_path / "run", resume="auto")
    assert (again.step, again.validation) == (result.step, None)
    assert "Raise training.steps, tokens, epochs or minutes to continue." in after_training(again)


@pytest.mark.usefixtures("ticking")
def test_resumed_run_has_the_time_that_is_left(recipe_of: Recipes, tmp_path: Path) -> None:
    assert train(recipe_of("training.minutes=0.1", "training.steps=5"), tmp_path / "run").step == 5, "the first limit"
    assert seconds(tmp_path / "run") == pytest.approx(9 * TICK)
    assert train(recipe_of(*BY_TIME, "training.minutes=0.04"), tmp_path / "run", resume="auto").step == 13
    assert seconds(tmp_path / "run") == pytest.approx(9 * TICK + 15 * TICK)


def test_processor_clock_stops_while_waiting(
    recipe_of: Recipes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {name: now() for name, now in CLOCKS.items()}
    time.sleep(0.2)
    waited = {name: now() - before[name] for name, now in CLOCKS.items()}
    assert waited["process"] < 0.2 <= waited["wall"]
    recipe = recipe_of("training.minutes=9", "training.steps=2", "training.log_every=2", "training.clock=process")
    assert train(recipe, tmp_path / "process").step == 2
    printed = capsys.readouterr().err
    assert "9 minutes of processor time or 2 steps" in printed
    assert re.search(r"step 2, \d+% of processor time: loss .* 00:00 of processor time left", printed)


def test_processor_time_is_divided_by_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    spent = 0.0
    monkeypatch.setattr(time, "process_time", lambda: spent)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    ours, alone = TrainingClock(Training(minutes=1.0, clock="process"), ENDLESS), trainer_of(1)
    with ours.pause():
        spent += 7
    spent += 2
    ours.step(alone)
    assert ours.seconds == 0.5
    assert ours.step(alone) > 0, "a step without time has a speed"


SECONDS = 2.0
"""Of a step."""


def occasions(training: Training, steps: int) -> Iterator[tuple[int, bool, bool]]:
    """Yield each step of a run, and whether it is validated and saved after it; the last step always is."""
    clock = TrainingClock(training, steps)
    intervals = Intervals(training, clock)
    step = 0
    while not clock.ends_at(step):
        step, clock.seconds = step + 1, clock.seconds + SECONDS
        validates = intervals.validates(step) or clock.ends_at(step)
        saves = validates or intervals.saves(step)
        if saves:
            intervals.saved()
        yield step, validates, saves


@pytest.mark.parametrize("name", shipped_recipes())
def test_recipe_validates_five_times_and_saves_often(name: str) -> None:
    recipe = recipe_file.load(name)
    known = list(occasions(recipe.training, count_steps(recipe.training, recipe.tokens_per_step, 10**6)))
    saved = [0, *(step for step, _, saves in known if saves)]
    assert sum(validates for _, validates, _ in known) >= 5
    assert max(after - before for before, after in pairwise(saved)) * SECONDS <= 600


@pytest.mark.parametrize(
    ("training", "steps", "validated"),
    [
        (Training(steps=600), 600, [120, 240, 360, 480, 600]),
        (Training(steps=3), 3, [1, 2, 3]),
        (Training(steps=2600), 2600, [434, 867, 1300, 1734, 2167, 2600]),
        (Training(minutes=10), ENDLESS, [60, 120, 180, 240, 300]),
        (Training(minutes=60), ENDLESS, [300, 600, 900, 1200, 1500, 1800]),
        (Training(minutes=60, steps=100), 100, [20, 40, 60, 80, 100]),
        (Training(steps=10, validate_every=4), 10, [4, 8, 10]),
    ],
)
def test_validations_are_spread_evenly(training: Training, steps: int, validated: list[int]) -> None:
    assert [step for step, validates, _ in occasions(training, steps) if validates] == validated


def test_run_that_validates_rarely_is_saved_every_ten_minutes() -> None:
    training = Training(steps=1000, validate_every=400)
    assert [step for step, _, saves in occasions(training, 1000) if saves] == [300, 400, 700, 800, 1000]
