"""Saved scores with changed values and a digest that is right: refused, or continued, and nothing else.

What a number stands for, and many more of them: `tools/fuzz.py crafted-scores --cases 1 --seed NUMBER`.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner
from surprisal.crafted_scores import Place, prepare, try_score, write

from lmlong.cli.score import score
from lmlong.errors import LmlongError

USUAL = 25


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return prepare(tmp_path_factory.mktemp("place"))


def test_the_first_crafted_scores(place: Place) -> None:
    tried = {number: try_score(number, place) for number in range(USUAL)}
    assert {number: complaints for number, (_, complaints) in tried.items() if complaints} == {}
    assert {what for what, _ in tried.values()} == {"refused", "scored"}


def test_an_unchanged_score_is_continued(place: Place) -> None:
    about, tensors = place.text
    write(place.crafted, about, tensors, about["score"])
    assert continued(place) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda saved: saved["unit"].update(begin=saved["unit"]["place"] + 16),
        lambda saved: saved["unit"]["gaps"].update(passed=-(10**6)),
        lambda saved: saved["unit"]["gaps"].update(ahead=[[0, -26]]),
        lambda saved: saved["unit"].update(bits=1.7e308),
        lambda saved: saved["totals"].update(bits=1.7e308),
        lambda saved: saved["totals"]["scores"].update(spread=5e-324, taken_at=1, bins=[3], counts=[1]),
    ],
)
def test_a_unit_that_no_text_has_is_refused(place: Place, change: Callable[[dict[str, Any]], None]) -> None:
    about, tensors = place.text
    saved = copy.deepcopy(about["score"])
    change(saved)
    write(place.crafted, about, tensors, saved)
    assert isinstance(continued(place), LmlongError)


def continued(place: Place) -> BaseException | None:
    words = [str(place.run), "--load-state", str(place.crafted)]
    return CliRunner().invoke(score, words, input=b"to be\n").exception
