"""Random documents and archives are read once or refused with a reason.

The document of a number that fails, and what is wrong: `tools/fuzz.py documents --cases 1 --seed NUMBER`.
"""

import pytest

from .document_draws import fuzz


@pytest.mark.parametrize("numbers", [range(300), pytest.param(range(300, 10_000), marks=pytest.mark.slow)])
def test_a_drawn_document_is_read_once_or_refused(numbers: range) -> None:
    assert {number: found for number in numbers if (found := fuzz(number)[1])} == {}


def test_every_outcome_is_drawn() -> None:
    outcomes = {fuzz(number)[0] for number in range(300)}
    assert outcomes >= {f"{kind} {outcome}" for kind in ("docx", "epub") for outcome in ("converted", "refused")}
    assert outcomes >= {"html converted", "zip read", "tar read", "tar left out"}
