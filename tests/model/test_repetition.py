"""DRY: the penalties of repeats, against their definition."""

import random
from typing import Any

import pytest
import torch

from lmlong.model.repetition import LARGEST_PENALTY, RepetitionGuard, lower_repeats
from lmlong.model.sampling_options import RECENT, Sampling

OPTIONS: dict[str, Any] = {"dry_multiplier": 0.8, "dry_base": 1.75, "dry_allowed_length": 2}


def guard_after(text: list[int], window: int = RECENT, **options: Any) -> RepetitionGuard:
    guard = RepetitionGuard(Sampling(**OPTIONS | options), window)
    for token in text:
        guard.append(token)
    return guard


def longest_matches(text: list[int], window: int) -> dict[int, int]:
    """Of each token in the window, how many tokens before it are the same as the last ones of the text, at most."""
    longest: dict[int, int] = {}
    for place in range(max(1, len(text) - window), len(text)):
        same = 0
        while same < place and text[place - 1 - same] == text[-1 - same]:
            same += 1
        longest[text[place]] = max(same, longest.get(text[place], 0))
    return longest


@pytest.mark.parametrize("window", [1, 2, 7, 40])
@pytest.mark.parametrize("allowed", [1, 2, 4])
def test_penalties_are_those_of_the_definition(window: int, allowed: int) -> None:
    draw = random.Random(window)
    for letters in (1, 2, 3, 8):
        text = [draw.randrange(letters) for _ in range(60)]
        for end in range(len(text)):
            expected = {
                token: min(0.8 * 1.75 ** (same - allowed), LARGEST_PENALTY)
                for token, same in longest_matches(text[:end], window).items()
                if same >= allowed
            }
            assert guard_after(text[:end], window, dry_allowed_length=allowed).penalties() == pytest.approx(expected)


def test_only_what_repeats_enough_is_lowered_and_by_more_the_longer_it_is() -> None:
    text = [1, 2, 3, 4, 9, 1, 2, 3]  # 4 followed 1 2 3; 9 followed 4 alone
    assert guard_after(text).penalties() == pytest.approx({4: 0.8 * 1.75})
    assert guard_after(text[:-1]).penalties() == pytest.approx({3: 0.8})
    assert guard_after(text[:-2]).penalties() == {}
    assert guard_after(text, dry_multiplier=2, dry_base=3, dry_allowed_length=1).penalties() == pytest.approx({4: 18})
    assert guard_after(text, dry_allowed_length=4).penalties() == {}


def test_a_penalty_has_a_limit_and_rows_have_penalties_of_their_own() -> None:
    logits = torch.zeros(3, 5)
    guards = [guard_after([1] * 900, dry_base=100), guard_after([2, 3, 4, 2, 3]), guard_after([0, 1, 2])]
    lowered = lower_repeats(logits, guards)
    assert lowered.isfinite().all() and (logits == 0).all()
    assert {(row, token) for row, token in lowered.nonzero().tolist()} == {(0, 1), (1, 4)}
    assert float(lowered[0, 1]) == -LARGEST_PENALTY and float(lowered[1, 4]) == pytest.approx(-0.8)


def test_a_text_of_any_length_takes_the_memory_of_its_window() -> None:
    draw = random.Random(0)
    guard = guard_after([draw.randrange(9) for _ in range(5000)], window=100)
    assert len(guard._tokens) == sum(map(len, guard._positions.values())) == 100
    assert len(guard._matches) <= 100
