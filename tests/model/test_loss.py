"""The chunked cross-entropy against torch's own, values and gradients."""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from lmlong.model.loss import IGNORED, LOGITS_CHUNK, summed_nll, token_nll


@pytest.mark.parametrize("tokens", [1, LOGITS_CHUNK - 1, LOGITS_CHUNK, 2 * LOGITS_CHUNK + 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_value_and_gradients_are_those_of_cross_entropy(tokens: int, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(tokens)
    hidden, weight = (torch.randn(n, 12, generator=draw, dtype=torch.float64) for n in (tokens, 30))
    targets = torch.randint(30, (tokens,), generator=draw)
    targets[::7] = IGNORED
    results = []
    for kind, function in ((torch.float64, _truth), (dtype, summed_nll)):
        leaves = [hidden.to(kind).requires_grad_(), weight.to(kind).requires_grad_()]
        loss = function(*leaves, targets)
        results.append([loss.detach(), *torch.autograd.grad(3 * loss, leaves)])
    allowed = 1e-12 if dtype == torch.float64 else 1e-5
    for truth, measured in zip(*results, strict=True):
        assert (measured - truth).norm() <= allowed * truth.norm()


def _truth(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(hidden @ weight.mT, targets, ignore_index=IGNORED, reduction="sum")


def test_each_target_has_its_own_nats() -> None:
    hidden, weight = torch.randn(2, 300, 8), torch.randn(20, 8)
    targets = torch.randint(20, (2, 300))
    targets[0, 5] = IGNORED
    truth = cross_entropy((hidden @ weight.mT).mT, targets, ignore_index=IGNORED, reduction="none")
    assert torch.allclose(token_nll(hidden, weight, targets), truth, atol=1e-5)
    assert token_nll(hidden, weight, targets)[0, 5] == 0


def test_equal_logits_cost_the_log_of_the_vocabulary() -> None:
    loss = summed_nll(torch.zeros(10, 4), torch.zeros(64, 4), torch.arange(10))
    assert math.isclose(float(loss), 10 * math.log(64), rel_tol=1e-6)


def test_bfloat16_keeps_its_sum_in_float32() -> None:
    hidden, weight = torch.zeros(5000, 4, dtype=torch.bfloat16), torch.zeros(64, 4, dtype=torch.bfloat16)
    loss = summed_nll(hidden, weight, torch.zeros(5000, dtype=torch.long))
    assert loss.dtype == torch.float32
    assert math.isclose(float(loss), 5000 * math.log(64), rel_tol=1e-4)


def test_gradients_are_computed_only_where_they_are_wanted() -> None:
    hidden, weight = torch.randn(600, 8), torch.randn(50, 8, requires_grad=True)
    flops = []
    for learning in (False, True):
        with torch.set_grad_enabled(learning), FlopCounterMode(display=False) as counter:
            summed_nll(hidden, weight, torch.zeros(600, dtype=torch.long))
        flops.append(counter.get_total_flops())
    assert flops == [2 * 600 * 50 * 8, 3 * 2 * 600 * 50 * 8]
