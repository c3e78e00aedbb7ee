"""The loss of a model that learns while it reads, beside its definition in float64."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from lmlong.model.learning.loss import Learning, learning_loss
from lmlong.model.learning.state import BLOCK
from lmlong.model.loss import IGNORED

VOCABULARY, TIME = 30, 100


def draw(starts: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw hidden states (2, T, width), a weight, tokens (2, T), and document starts in the second row."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, TIME, 12).double(), torch.randn(VOCABULARY, 12).double()
    document_starts = torch.zeros(2, TIME, dtype=torch.bool)
    document_starts[1, list(starts)] = True
    return hidden.requires_grad_(), weight.requires_grad_(), torch.randint(VOCABULARY, (2, TIME)), document_starts


def targets_of(tokens: Tensor, document_starts: Tensor) -> Tensor:
    """Return the token after each, where it belongs to the same document."""
    targets = tokens.roll(-1, 1).masked_fill(document_starts.roll(-1, 1), IGNORED)
    targets[:, -1] = IGNORED
    return targets


def definition(weight: Tensor, hidden: Tensor, tokens: Tensor, learning: Learning) -> Tensor:
    """Return the loss of one document, whose gradient takes what is learned as a constant."""
    D, bias, nll = torch.zeros_like(weight), torch.zeros_like(weight[:, 0]), weight.new_zeros(())
    for h, following in zip(hidden[:-1].split(BLOCK), tokens[1:].split(BLOCK), strict=True):
        logits = h @ (weight + D).mT + bias
        nll = nll + cross_entropy(logits, following, reduction="sum")
        errors = (logits.softmax(-1) - one_hot(following, VOCABULARY)).detach()
        D = (1 - learning.decay) * D - learning.rate / learning.hidden_square * errors.mT @ h.detach()
        bias = (1 - learning.decay) * bias - learning.bias_rate * errors.sum(0)
    return nll


@pytest.mark.parametrize(
    ("chunk", "decay"), [pytest.param(BLOCK, 0.01, id="decay, in chunks of a block"), (2 * BLOCK, 0.0), (256, 0.0)]
)
def test_values_and_gradients_are_those_of_the_definition(chunk: int, decay: float) -> None:
    starts = () if chunk > TIME else (0, 2 * BLOCK)
    hidden, weight, tokens, document_starts = draw(starts)
    learning = Learning(document_starts, torch.tensor(2.0), 0.04, 0.05, decay, chunk)
    documents = [(0, 0, TIME), *((1, *ends) for ends in zip((0, *starts[1:]), (*starts[1:], TIME), strict=True))]
    expected = weight.new_zeros(())
    for row, begin, end in documents:
        expected = expected + definition(weight, hidden[row, begin:end], tokens[row, begin:end], learning)
    loss = learning_loss(hidden, weight, targets_of(tokens, document_starts), learning)
    assert torch.allclose(loss, expected, rtol=1e-12)
    for name, x in (("hidden", hidden), ("weight", weight)):
        actual, exact = (torch.autograd.grad(2 * y, x, retain_graph=True)[0] for y in (loss, expected))
        assert torch.allclose(actual, exact, rtol=1e-12, atol=1e-12), name


@pytest.mark.parametrize("start", [20, 2 * BLOCK, 50])
def test_nothing_is_learned_from_the_document_before(start: int) -> None:
    hidden, weight, tokens, document_starts = draw((start,))
    targets, gradients = targets_of(tokens, document_starts), []
    for factor in (1.0, -1.0):
        changed = torch.cat([hidden[:, :start] * factor, hidden[:, start:]], 1).detach().requires_grad_()
        loss = learning_loss(
            changed, weight, targets, Learning(document_starts, torch.tensor(2.0), 0.04, 0.05, chunk=2 * BLOCK)
        )
        gradients.append(torch.autograd.grad(loss, changed)[0][:, start:])
    assert not torch.equal(gradients[0][0], gradients[1][0]), "one document"
    assert torch.equal(gradients[0][1], gradients[1][1]), "two documents"


def test_the_loss_in_bfloat16_is_about_that_in_float32() -> None:
    hidden, weight, tokens, document_starts = draw(())
    targets, results = targets_of(tokens, document_starts), []
    for enabled in (False, True):
        leaves = [x.detach().float().requires_grad_() for x in (hidden, weight)]
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = learning_loss(*leaves, targets, Learning(document_starts, torch.tensor(125.0), chunk=2 * BLOCK))
        results.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
    for exact, rounded in zip(*results, strict=True):
        assert exact.dtype == rounded.dtype == torch.float32
        assert 0 < (exact - rounded).norm() < 0.01 * exact.norm()
