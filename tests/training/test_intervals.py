"""When runs validate and save: often enough by default, whatever their length."""

from collections.abc import Iterator
from itertools import pairwise

import pytest

from lmlong.recipe import Training
from lmlong.recipe import file as recipe_file
from lmlong.recipe.find import shipped_recipes
from lmlong.training.optimizer import ENDLESS, count_steps
from lmlong.training.progress import Intervals, TrainingClock

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
