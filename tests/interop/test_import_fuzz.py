"""Pretrained models with random values are imported, or refused with an error that names the file.

The model of a number that fails, and what is wrong: `tools/fuzz.py imports --cases 1 --seed NUMBER`.
"""

import pytest

from .import_draws import fuzz


@pytest.mark.parametrize("numbers", [range(100), pytest.param(range(100, 3000), marks=pytest.mark.slow)])
def test_a_drawn_model_is_imported_or_refused(numbers: range) -> None:
    assert {number: found for number in numbers if (found := fuzz(number)[1])} == {}


def test_every_outcome_is_drawn() -> None:
    outcomes = {fuzz(number)[0] for number in range(40)}
    assert outcomes == {f"{kind} {outcome}" for kind in ("folder", "gguf") for outcome in ("imported", "refused")}
