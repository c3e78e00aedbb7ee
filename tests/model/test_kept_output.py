"""Learning from the most probable tokens of a teacher, against its whole distribution."""

import pytest
import torch
from torch import Tensor

from lmlong.model.kept_output import KeptOutput, merge, most_probable
from lmlong.model.loss import IGNORED, Softening, TeacherOutput, chunked_cross_entropy

TOKENS, VOCABULARY = 70, 30
SOFTENINGS = [Softening(1.0, 1.0), Softening(0.3, 2.5)]


def draw() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return hidden states and weights of a student and of a teacher, and targets."""
    noise = torch.Generator().manual_seed(0)
    sizes = ((TOKENS, 12), (VOCABULARY, 12), (TOKENS, 7), (VOCABULARY, 7))
    tensors = [torch.randn(*size, generator=noise, dtype=torch.float64) for size in sizes]
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=noise)
    targets[3::7] = IGNORED
    return *tensors, targets  # type: ignore[return-value]


def kept_of(hidden: Tensor, weight: Tensor, soft: Softening, count: int) -> KeptOutput:
    tokens, log_q = most_probable((hidden @ weight.mT / soft.temperature).log_softmax(-1), count)
    return KeptOutput(tokens, log_q, soft)


@pytest.mark.parametrize("soft", SOFTENINGS)
def test_all_tokens_of_the_vocabulary_are_the_whole_distribution(soft: Softening) -> None:
    hidden, weight, theirs, their_weight, targets = draw()
    teachers = (TeacherOutput(theirs, their_weight, soft), kept_of(theirs, their_weight, soft, VOCABULARY + 5))
    results = []
    for teacher in teachers:
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        losses = chunked_cross_entropy(*leaves, targets, teacher)
        results.append([losses.detach(), *torch.autograd.grad(losses[0], leaves)])
    for expected, kept in zip(*results, strict=True):
        assert (kept - expected).norm() <= 1e-12 * expected.norm()


@pytest.mark.parametrize("count", [1, 4, VOCABULARY - 1])
@pytest.mark.parametrize("soft", SOFTENINGS)
def test_value_and_gradients_are_those_of_the_merged_distributions(soft: Softening, count: int) -> None:
    hidden, weight, theirs, their_weight, targets = draw()
    teacher = kept_of(theirs, their_weight, soft, count)
    leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    losses = chunked_cross_entropy(*leaves, targets, teacher)
    log_p = (leaves[0] @ leaves[1].mT / soft.temperature).log_softmax(-1)
    rest = 1 - log_p.exp().gather(1, teacher.tokens).sum(1, keepdim=True)
    merged = torch.cat([log_p.gather(1, teacher.tokens), rest.log()], 1)
    divergence = (teacher.log_q.exp() * (teacher.log_q - merged)).sum(1)[targets != IGNORED].sum()
    expected = (1 - soft.share) * losses[1] + soft.share * soft.temperature**2 * divergence
    assert losses[0].item() == pytest.approx(expected.item(), rel=1e-10)
    nll = torch.nn.functional.cross_entropy(leaves[0] @ leaves[1].mT, targets, ignore_index=IGNORED, reduction="sum")
    truth = (1 - soft.share) * nll + soft.share * soft.temperature**2 * divergence
    for kept, exact in zip(torch.autograd.grad(losses[0], leaves), torch.autograd.grad(truth, leaves), strict=True):
        assert (kept - exact).norm() <= 1e-9 * exact.norm()


def test_the_divergence_grows_with_the_tokens_kept_up_to_the_whole() -> None:
    hidden, weight, theirs, their_weight, targets = draw()
    soft = SOFTENINGS[0]
    losses = [
        float(chunked_cross_entropy(hidden, weight, targets, kept_of(theirs, their_weight, soft, count))[0])
        for count in (1, 2, 5, 10, 20, VOCABULARY)
    ]
    assert losses == sorted(losses) and losses[0] > 0


def test_extreme_distributions_have_finite_gradients() -> None:
    logits = torch.tensor([[200.0, 0.0, -200.0, 0.0], [0.0, 300.0, 0.0, 0.0]])
    tokens = torch.tensor([[1], [0]])
    teacher = KeptOutput(
        tokens, merge(torch.tensor([[0.0, 0, 0, 0], [0, 0, 90.0, 0]]).log_softmax(-1), tokens), SOFTENINGS[0]
    )
    loss, gradient = teacher.soft_loss(logits, torch.tensor([True, True]), slice(0, 2))
    assert loss.isfinite() and gradient.isfinite().all()
    assert gradient.sum(-1).abs().max() < 1e-5
