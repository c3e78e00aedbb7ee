"""The candidates of experiments and benchmarks are valid options, one kind in all layers or a pattern."""

import pytest

from lmlong.recipe import Attention
from lmlong.recipe.candidates import CANDIDATES, NOT_TRAINED, SPEED_WINDOW, single_kinds


@pytest.mark.parametrize("name", CANDIDATES)
def test_each_candidate_is_valid_and_a_pattern_unless_it_is_one_kind(name: str) -> None:
    kind = Attention.model_validate(CANDIDATES[name]).kind
    assert isinstance(kind, str) == (name in single_kinds())


def test_speed_benchmarks_have_a_longer_window_and_all_else_is_as_it_is_trained() -> None:
    assert single_kinds()["window"] == {"kind": "window", "window": SPEED_WINDOW}
    assert all(options == CANDIDATES[name] for name, options in single_kinds().items() if name != "window")
    assert set(NOT_TRAINED) < set(single_kinds())
