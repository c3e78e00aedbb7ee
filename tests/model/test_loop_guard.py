"""The penalties of loops, against their definition."""

import random
from collections import Counter
from collections.abc import Iterator
from itertools import islice

import pytest
import torch

from lmlong.model.loop_guard import BASE, LARGEST_PENALTY, OFTEN, SPAN, UNIT, LoopGuard, lower_loops
from lmlong.model.sampling_options import RECENT, Sampling


def guard_after(text: list[int], window: int = RECENT, penalty: float = 0.5) -> LoopGuard:
    guard = LoopGuard(Sampling(loop_penalty=penalty), window)
    for token in text:
        guard.append(token)
    return guard


def defined_penalties(text: list[int], window: int) -> dict[int, float]:
    """The definition, by comparing the end of the text with itself shifted by each p."""
    lowered: dict[int, float] = {}
    for shift in range(1, min(window, len(text)) + 1):
        same = 0
        while same + shift < len(text) and text[-1 - same] == text[-1 - same - shift]:
            same += 1
        if same >= max(shift, 2):
            penalty = min(0.5 * BASE ** (same - max(shift, 2)), LARGEST_PENALTY)
            lowered[text[-shift]] = max(penalty, lowered.get(text[-shift], 0))
    ends = range(max(UNIT, len(text) + 1 - SPAN), len(text) + 1)
    units = Counter(tuple(text[end - UNIT : end]) for end in ends)
    for (*before, token), count in units.items():
        if before == text[1 - UNIT :] and count >= OFTEN:
            lowered[token] = max(0.5 * (count - OFTEN + 1), lowered.get(token, 0))
    return lowered


def texts(draw: random.Random) -> Iterator[list[int]]:
    """Loops of one to three letters, two letters in any order, and lines that begin alike."""
    for letters in (1, 2, 3):
        yield [draw.randrange(letters) for _ in range(20)] + [draw.randrange(letters) for _ in range(5)] * 4
    yield [draw.randrange(2) for _ in range(400)]
    yield [token for line in range(10) for token in (1, 2, 3, 4, 5, *(draw.randrange(9, 99) for _ in range(30)))]


@pytest.mark.parametrize("window", [1, 2, 7, 40, RECENT])
def test_penalties_are_those_of_the_definition(window: int) -> None:
    lowered = []
    for text in islice(texts(random.Random(window)), 3 if window < RECENT else None):  # others are counted by SPAN
        lowered.append(0)
        for end in range(0, len(text) + 1, 1 + len(text) // 50):
            expected = defined_penalties(text[:end], window)
            lowered[-1] += len(expected)
            assert guard_after(text[:end], window).penalties() == pytest.approx(expected)
    assert sum(lowered[:3]) > 20
    assert window < RECENT or lowered[3] > 50
    assert window < RECENT or not lowered[4]


def test_a_penalty_has_a_limit_and_rows_have_penalties_of_their_own() -> None:
    logits = torch.zeros(3, 5)
    guards = [guard_after([1] * 900), guard_after([2, 3, 4, 2, 3, 4]), guard_after([0, 1, 2])]
    lowered = lower_loops(logits, guards)
    assert lowered.isfinite().all() and (logits == 0).all()
    assert {(row, token) for row, token in lowered.nonzero().tolist()} == {(0, 1), (1, 2)}
    assert float(lowered[0, 1]) == -LARGEST_PENALTY and float(lowered[1, 2]) == pytest.approx(-0.5)
