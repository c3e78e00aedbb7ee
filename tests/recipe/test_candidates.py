"""The candidates of experiments and benchmarks are valid options, one kind in all layers or a pattern."""

import pytest

from lmlong.recipe import Attention
from lmlong.recipe.candidates import CANDIDATES, single_kinds


@pytest.mark.parametrize("name", CANDIDATES)
def test_each_candidate_is_valid_and_a_pattern_unless_it_is_one_kind(name: str) -> None:
    kind = Attention.model_validate(CANDIDATES[name]).kind
    assert isinstance(kind, str) == (name in single_kinds())
