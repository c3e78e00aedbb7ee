"""Saved scores with impossible values under a correct digest are refused; tests/crafted.py draws more of them."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner
from surprisal.crafted_scores import Place, prepare, write

from lmlong.cli.score import score
from lmlong.errors import LmlongError


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return prepare(tmp_path_factory.mktemp("place"))


def test_unchanged_score_is_continued(place: Place) -> None:
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
def test_impossible_score_is_refused(place: Place, change: Callable[[dict[str, Any]], None]) -> None:
    about, tensors = place.text
    saved = copy.deepcopy(about["score"])
    change(saved)
    write(place.crafted, about, tensors, saved)
    assert isinstance(continued(place), LmlongError)


def continued(place: Place) -> BaseException | None:
    words = [str(place.run), "--load-state", str(place.crafted)]
    return CliRunner().invoke(score, words, input=b"to be\n").exception
