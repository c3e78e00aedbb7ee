"""Pretrained models with random values are imported, or refused with an error that names the file.

The model of a number that fails, and what is wrong: `tools/fuzz.py imports --cases 1 --seed NUMBER`.
"""

import pytest

from .import_draws import fuzz


@pytest.mark.parametrize("numbers", [range(60), pytest.param(range(60, 3000), marks=pytest.mark.slow)])
def test_a_drawn_model_is_imported_or_refused(numbers: range) -> None:
    found = {number: fuzz(number) for number in numbers}
    assert {number: complaints for number, (_, complaints) in found.items() if complaints} == {}
    outcomes = {f"{kind} {outcome}" for kind in ("folder", "gguf") for outcome in ("imported", "refused")}
    assert {outcome for outcome, _ in found.values()} == outcomes
