"""The chunked cross-entropy against torch's own, values and gradients."""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy, kl_div
from torch.utils.flop_counter import FlopCounterMode

from lmlong.attention.device_policy import CPU_POLICY
from lmlong.model.loss import IGNORED, chunked_cross_entropy, token_nll
from lmlong.training.distillation import Softening, TeacherOutput

CHUNK = CPU_POLICY.logit_tokens
assert CHUNK


SOFTENINGS = [None, Softening(0.5, 1.0), Softening(1.0, 1.0), Softening(0.3, 2.5)]


@pytest.mark.parametrize("soft", SOFTENINGS)
@pytest.mark.parametrize("tokens", [1, CHUNK - 1, CHUNK, 2 * CHUNK + 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_loss_is_cross_entropy_and_the_divergence_from_a_teacher(
    soft: Softening | None, tokens: int, dtype: torch.dtype
) -> None:
    """Values and gradients, with a teacher or without."""
    draw = torch.Generator().manual_seed(tokens)
    hidden, weight = (torch.randn(n, 12, generator=draw, dtype=torch.float64) for n in (tokens, 30))
    theirs, their_weight = (torch.randn(n, 7, generator=draw, dtype=torch.float64) for n in (tokens, 30))
    targets = torch.randint(30, (tokens,), generator=draw)
    targets[3::7] = IGNORED

    def truth(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        nll = _truth(hidden, weight, targets)
        if soft is None:
            return nll[None]
        scored = targets != IGNORED
        pairs = ((hidden, weight), (theirs.to(hidden), their_weight.to(hidden)))
        ours, taught = ((h @ w.mT / soft.temperature)[scored].log_softmax(-1) for h, w in pairs)
        divergence = kl_div(ours, taught, reduction="sum", log_target=True)
        return torch.stack([(1 - soft.share) * nll + soft.share * soft.temperature**2 * divergence, nll])

    def measured(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if soft is None:
            return chunked_cross_entropy(hidden, weight, targets)[None]
        teacher = TeacherOutput(theirs.to(hidden), their_weight.to(hidden), soft)
        return chunked_cross_entropy(hidden, weight, targets, of_chunk=teacher.student_loss)

    results = []
    for kind, function in ((torch.float64, truth), (dtype, measured)):
        leaves = [hidden.to(kind).requires_grad_(), weight.to(kind).requires_grad_()]
        losses = function(*leaves)
        results.append([losses.detach(), *torch.autograd.grad(3 * losses[0], leaves)])
    allowed = 1e-12 if dtype == torch.float64 else 1e-5
    for exact, found in zip(*results, strict=True):
        assert (found - exact).norm() <= allowed * exact.norm()


def _truth(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(hidden @ weight.mT, targets, ignore_index=IGNORED, reduction="sum")


def test_the_logits_of_a_large_vocabulary_are_of_fewer_tokens_at_a_time() -> None:
    vocabulary = CPU_POLICY.logits // 100
    hidden, weight = torch.randn(250, 4, requires_grad=True), torch.randn(vocabulary, 4, requires_grad=True)
    targets, teacher = (
        torch.randint(vocabulary, (250,)),
        TeacherOutput(torch.randn(250, 4), weight, Softening(0.0, 1.0)),
    )
    truth = torch.autograd.grad(_truth(hidden, weight, targets), (hidden, weight))
    alone = torch.autograd.grad(chunked_cross_entropy(hidden, weight, targets), (hidden, weight))
    taught = torch.autograd.grad(
        chunked_cross_entropy(hidden, weight, targets, of_chunk=teacher.student_loss)[0], (hidden, weight)
    )
    for exact, *found in zip(truth, alone, taught, strict=True):
        assert max((each - exact).norm() for each in found) <= 1e-5 * exact.norm()


def test_token_nll_is_the_cross_entropy_of_each_target() -> None:
    hidden, weight = torch.randn(2, 300, 8), torch.randn(20, 8)
    targets = torch.randint(20, (2, 300))
    targets[0, 5] = IGNORED
    truth = cross_entropy((hidden @ weight.mT).mT, targets, ignore_index=IGNORED, reduction="none")
    nll = token_nll(hidden, lambda hidden: hidden @ weight.mT, 20, targets)
    assert torch.allclose(nll, truth, atol=1e-5)
    assert nll[0, 5] == 0


def test_bfloat16_keeps_its_sum_in_float32() -> None:
    hidden, weight = torch.zeros(5000, 4, dtype=torch.bfloat16), torch.zeros(64, 4, dtype=torch.bfloat16)
    loss = chunked_cross_entropy(hidden, weight, torch.zeros(5000, dtype=torch.long))
    assert loss.dtype == torch.float32
    assert math.isclose(float(loss), 5000 * math.log(64), rel_tol=1e-4)


def test_no_gradients_are_computed_without_grad() -> None:
    hidden, weight = torch.randn(600, 8), torch.randn(50, 8, requires_grad=True)
    flops = []
    for learning in (False, True):
        with torch.set_grad_enabled(learning), FlopCounterMode(display=False) as counter:
            chunked_cross_entropy(hidden, weight, torch.zeros(600, dtype=torch.long))
        flops.append(counter.get_total_flops())
    assert flops == [2 * 600 * 50 * 8, 3 * 2 * 600 * 50 * 8]
