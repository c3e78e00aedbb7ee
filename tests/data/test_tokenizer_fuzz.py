"""Random tokenizers lose nothing, or are refused with a reason.

The tokenizer of a number that fails, and what is wrong: `tools/fuzz.py tokenizers --cases 1 --seed NUMBER`.
"""

from .tokenizer_draws import fuzz


def test_a_drawn_tokenizer_loses_nothing_or_is_refused() -> None:
    drawn = {number: fuzz(number) for number in range(30)}
    assert {number: complaints for number, (_, complaints) in drawn.items() if complaints} == {}
    assert {outcome for outcome, _ in drawn.values()} == {"refused", "trained", "loaded"}
