"""How a token is drawn: distributions in closed form, and the numbers that draw from them."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lmlong.errors import UsageError
from lmlong.inference.sampling import (
    Sampler,
    Sampling,
    draw,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    penalised,
    probabilities,
    sample,
    tempered,
)
from lmlong.inference.session import NO_TOKEN
from lmlong.model.sampling_options import random_seed

ALL = [0, 1, 2, 3]
EIGHTHS = torch.tensor([[0.125, 0.5, 0.125, 0.25]], dtype=torch.float64)


def logits_of(*chances: float) -> Tensor:
    return torch.tensor([chances], dtype=torch.float64).log()


def kept(probs: Tensor) -> list[int]:
    return probs[0].nonzero()[:, 0].tolist()


def test_without_the_guard_tokens_come_as_often_as_softmax_says() -> None:
    logits, rows, calls = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5]), 50, 400
    samplers = [Sampler(Sampling(temperature=0.7, loop_penalty=0, seed=3), (row,)) for row in range(rows)]
    drawn = torch.tensor([sample(samplers, logits.expand(rows, -1)) for _ in range(calls)])
    shares = drawn.flatten().bincount(minlength=5) / drawn.numel()
    expected = (logits / 0.7).softmax(-1)
    deviation = (expected * (1 - expected) / drawn.numel()).sqrt()
    assert ((shares - expected).abs() < 4 * deviation).all()


def test_a_uniform_number_selects_a_token_that_has_a_probability() -> None:
    uniform = [0.0, 0.1249, 0.125, 0.6249, 0.625, 0.7499, 0.75, 1 - 2**-53]
    assert draw(EIGHTHS.expand(8, -1), uniform) == [0, 0, 1, 1, 2, 2, 3, 3]
    probs = torch.tensor([[0.0, 0.3, 0.0, 0.3, 0.0]], dtype=torch.float64)
    assert draw(probs.expand(3, -1), [0.0, 0.5, 1 - 2**-53]) == [1, 3, 3]


@pytest.mark.parametrize(
    ("keep", "value", "tokens"),
    [
        *((keep_top_k, k, tokens) for k, tokens in ((1, [1]), (2, [1, 3]), (3, [0, 1, 3]), (4, ALL), (9, ALL))),
        *((keep_top_p, share, tokens) for share, tokens in ((1e-9, [1]), (0.5, [1]), (0.51, [1, 3]), (0.75, [1, 3]))),
        *((keep_top_p, share, tokens) for share, tokens in ((0.76, [0, 1, 3]), (0.88, ALL))),
        *((keep_min_p, share, tokens) for share, tokens in ((0.25, ALL), (0.26, [1, 3]), (0.5, [1, 3]), (0.51, [1]))),
    ],
)
def test_which_tokens_are_kept(keep: Callable[[Tensor, Any], Tensor], value: float, tokens: list[int]) -> None:
    """Of equal tokens the first, and the token that crosses a share."""
    assert kept(keep(EIGHTHS, value)) == kept(keep(3 * EIGHTHS, value)) == tokens


def test_top_p_is_a_share_of_what_top_k_left() -> None:
    logits = logits_of(0.4, 0.3, 0.2, 0.1)
    assert kept(probabilities(logits, Sampling(temperature=1, top_p=0.55))) == [0, 1]
    assert kept(probabilities(logits, Sampling(temperature=1, top_p=0.55, top_k=2))) == [0]


def test_temperature_in_closed_form() -> None:
    squares = torch.tensor([[0.36, 0.09, 0.01]], dtype=torch.float64)
    torch.testing.assert_close(tempered(logits_of(0.6, 0.3, 0.1), 0.5), squares / squares.sum())
    assert tempered(torch.tensor([[3.0e4, 3.1e4, -3.0e4]]), 1e-300).tolist() == [[0.0, 1.0, 0.0]]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("top_k", 0),
        ("top_p", 0.0),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("loop_penalty", -0.5),
        ("seed", -1),
    ],
)
def test_an_option_out_of_range_is_named_with_its_value(option: str, value: float) -> None:
    with pytest.raises(UsageError, match=f"^{option}: {value} is out of range"):
        Sampling(**{option: value})  # type: ignore[arg-type]


def test_a_penalty_acts_on_recent_tokens_alone_and_once() -> None:
    logits = torch.tensor([[2.0, -1.0, 0.5, 3.0], [2.0, -1.0, 0.5, 3.0]])
    recent = torch.tensor([[NO_TOKEN, 0, 0, 1], [NO_TOKEN, NO_TOKEN, NO_TOKEN, NO_TOKEN]])
    assert penalised(logits, recent, 2.0).tolist() == [[1.0, -2.0, 0.5, 3.0], [2.0, -1.0, 0.5, 3.0]]


@pytest.mark.parametrize(("window", "token"), [(3, 1), (2, 0), (1, 0)])
def test_a_penalty_looks_back_as_far_as_its_window(window: int, token: int) -> None:
    logits = torch.tensor([[1.0, 0.9, 0.0]])
    options = Sampling(temperature=0, repetition_penalty=3.0, repetition_window=window)
    assert sample([Sampler(options)], logits, [[0, 2, 2]]) == [token]


def test_a_random_seed_is_short_enough_to_type() -> None:
    seeds = {random_seed() for _ in range(64)}
    assert len(seeds) == 64 and max(seeds) < 2**32
