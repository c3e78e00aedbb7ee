"""The robust z-score in constant memory is that of exact medians, to the width of a bin."""

import json

import numpy as np
import pytest

from lmlong.surprisal.robust_score import LEAST, SIGMA, RobustScore


def exact(before: np.ndarray, value: float) -> float:
    median = np.median(before)
    return float((value - median) / (SIGMA * np.median(np.abs(before - median))))


@pytest.mark.parametrize("draw", ["lognormal", "exponential", "normal"])
def test_scores_are_those_of_exact_medians(draw: str) -> None:
    random = np.random.default_rng(0)
    numbers = {
        "lognormal": random.lognormal(3, 1, 3000),
        "exponential": random.exponential(20, 3000),
        "normal": np.abs(random.normal(100, 10, 3000)),
    }[draw]
    scores = RobustScore()
    for number, value in enumerate(numbers):
        found = scores.add(value)
        if number < LEAST:
            assert found is None
        elif number > 300:
            # medians are taken anew once there is a hundredth more, and known to a hundredth
            assert found == pytest.approx(exact(numbers[:number], value), rel=0.1, abs=0.15)


def test_outliers_do_not_change_scores() -> None:
    random = np.random.default_rng(1)
    plain, disturbed = RobustScore(), RobustScore()
    for number, value in enumerate(random.normal(100, 10, 1000)):
        plain.add(value)
        disturbed.add(1e9 if number % 50 == 7 else value)
    assert disturbed.add(150) == pytest.approx(plain.add(150), abs=0.3)


def test_numbers_that_are_all_the_same_leave_finite_scores() -> None:
    scores = RobustScore()
    for value in [*[0.0] * 40, *[5.0] * 100]:
        scores.add(value)
    assert scores.add(5.0) == pytest.approx(0, abs=1) and 10 < scores.add(50.0) < 1e9  # type: ignore[operator]
    assert np.isfinite(RobustScore().add(1e30) or 0)


def test_scores_continue_the_same_from_json() -> None:
    numbers = np.random.default_rng(2).exponential(3, 500)
    whole, first = RobustScore(), RobustScore()
    expected = [whole.add(value) for value in numbers]
    found = [first.add(value) for value in numbers[:201]]
    second = RobustScore.from_json(json.loads(json.dumps(first.to_json())))
    assert found + [second.add(value) for value in numbers[201:]] == expected
