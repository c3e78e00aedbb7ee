"""Random documents and archives are read once or refused with a reason.

The document of a number that fails, and what is wrong: `tools/fuzz.py documents --cases 1 --seed NUMBER`.
"""

import pytest

from .document_draws import fuzz


@pytest.mark.parametrize("numbers", [range(300), pytest.param(range(300, 10_000), marks=pytest.mark.slow)])
def test_a_drawn_document_is_read_once_or_refused(numbers: range) -> None:
    drawn = {number: fuzz(number) for number in numbers}
    assert {number: complaints for number, (_, complaints) in drawn.items() if complaints} == {}
    outcomes = {outcome for outcome, _ in drawn.values()}
    assert outcomes >= {f"{kind} {outcome}" for kind in ("docx", "epub") for outcome in ("converted", "refused")}
    assert outcomes >= {"html converted", "zip read", "tar read", "tar left out"}
