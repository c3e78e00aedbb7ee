"""The candidates of benchmarks are valid options, with one kind in all layers."""

import pytest

from lmlong.recipe import Attention
from lmlong.recipe.kinds import CANDIDATES


@pytest.mark.parametrize("name", CANDIDATES)
def test_each_candidate_is_valid_and_of_one_kind(name: str) -> None:
    assert isinstance(Attention.model_validate(CANDIDATES[name]).kind, str)
