"""Random tokenizers lose nothing, or are refused with a reason.

The tokenizer of a number that fails, and what is wrong: `tools/fuzz.py tokenizers --cases 1 --seed NUMBER`.
"""

import pytest

from .tokenizer_draws import fuzz


@pytest.mark.parametrize("number", range(30))
def test_a_drawn_tokenizer_loses_nothing_or_is_refused(number: int) -> None:
    assert fuzz(number)[1] == []


def test_every_kind_is_drawn() -> None:
    assert {fuzz(number)[0] for number in range(15)} == {"refused", "trained", "loaded"}
