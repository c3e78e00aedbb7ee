"""The loss of a model that learns while it reads, for training.

Within a chunk, the logits of a block are those by D from before the chunk, minus similarity @ errors over the earlier
blocks, so that D is updated only once for each chunk. The gradient takes D as a constant.

B batch, T time, N positions of a chunk, V vocabulary.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lmlong.model.language_model import LanguageModel, ModelState
from lmlong.model.learning.state import BLOCK
from lmlong.model.loss import IGNORED

CHUNK = 256


class Learning(NamedTuple):
    """How the output layer learns from rows."""

    document_starts: Tensor  # (B, T)
    hidden_square: Tensor  # the expected square of a hidden state's norm
    rate: float = 1.0  # of D, for hidden states of norm 1
    bias_rate: float = 0.1
    decay: float = 0.001  # the share that is forgotten with each block
    chunk: int = CHUNK


def loss_while_learning(
    model: LanguageModel, tokens: Tensor, targets: Tensor, document_starts: Tensor, state: ModelState | None = None
) -> tuple[Tensor, ModelState]:
    """Return the summed -log p of the targets (B, T), each predicted after learning from those before it in its row and
    document, and the state after, without what was learned."""
    hidden, state = model(tokens, state, document_starts)
    learning = Learning(document_starts, model.norm.weight.detach().square().sum())
    return model.lm_head(hidden, partial(learning_loss, targets=targets, learning=learning)), state


def learning_loss(hidden: Tensor, weight: Tensor, targets: Tensor, learning: Learning) -> Tensor:
    """Return the summed -log p of the targets (B, T), each predicted after learning from its document so far, within
    the row, for hidden (B, T, width) and weight (V, width).

    The rule is simpler than that of reading: constant rates, no scale, and a decay after each chunk. D is reset at the
    beginning of a chunk in which a document starts.
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        hidden = hidden.to(torch.get_autocast_dtype(device))
    with torch.autocast(device, enabled=False):
        loss: Tensor = _LearningLoss.apply(hidden, weight, targets, learning)
    return loss


class _LearningLoss(torch.autograd.Function):
    """The loss, with gradients computed in the forward pass, so that only the logits of a chunk exist at once."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, learning: Learning) -> Tensor:
        document_starts, hidden_square, rate, bias_rate, decay, chunk = learning
        shrunk = rate / hidden_square  # without a dimension, so products keep the dtype of hidden states
        matrix, wide = weight.to(hidden.dtype), torch.promote_types(hidden.dtype, torch.float32)
        D, bias = matrix.new_zeros(len(hidden), *matrix.shape), matrix.new_zeros(len(hidden), len(matrix), dtype=wide)
        nll_sum, dhidden, dweight = bias.new_zeros(()), torch.empty_like(hidden), torch.zeros_like(matrix, dtype=wide)
        for begin in range(0, hidden.shape[1], chunk):
            span = slice(begin, begin + chunk)
            h, number = hidden[:, span], document_starts[:, span].cumsum(1)  # the number of the document
            block = torch.arange(h.shape[1], device=h.device) // BLOCK
            is_earlier = (block[:, None] > block) & (number[..., None] == number[:, None])
            continues = number[:, -1:] == 0
            D, bias = D * continues[..., None], bias * continues
            output = matrix + D
            similarity = (shrunk * (h @ h.mT) + bias_rate) * is_earlier
            nll, errors = _nll_and_errors(h @ output.mT, bias, similarity, targets[:, span])
            nll_sum += nll
            dproducts = (errors @ errors.mT).mul_(is_earlier).mul_(-shrunk)
            dhidden[:, span] = (errors @ output).baddbmm_(dproducts, h)
            dweight += errors.flatten(0, 1).mT @ h.flatten(0, 1)
            kept, is_last = (1 - decay) ** (len(block) / BLOCK), (number == number[:, -1:])[..., None].to(h.dtype)
            D = D.baddbmm_(errors.mT, h * is_last * -shrunk, beta=kept)
            bias = kept * bias - bias_rate * (errors.mT @ is_last)[..., 0]
        ctx.save_for_backward(dhidden, dweight)
        ctx.weight_dtype = weight.dtype
        return nll_sum

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dhidden, dweight = ctx.saved_tensors
        return dhidden * grads[0].to(dhidden.dtype), (dweight * grads[0]).to(ctx.weight_dtype), None, None


def _nll_and_errors(logits: Tensor, bias: Tensor, similarity: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the summed -log p of the targets (B, N), and p - onehot (B, N, V), in the memory of the logits (B, N, V)
    by D and the bias (B, V) from before the chunk. `similarity` is (B, N, N)."""
    errors, nll = logits, bias.new_zeros(())
    is_scored = (targets != IGNORED)[..., None]
    targets = targets[..., None].where(is_scored, 0)
    for begin in range(0, logits.shape[1], BLOCK):
        span = slice(begin, begin + BLOCK)
        block = logits[:, span] + bias[:, None]
        if begin:
            block -= similarity[:, span, :begin] @ errors[:, :begin]
        log_p = block.log_softmax(-1)
        chosen = log_p.gather(-1, targets[:, span])
        nll -= chosen.where(is_scored[:, span], 0).sum()
        p = log_p.exp_().scatter_(-1, targets[:, span], chosen.expm1())
        errors[:, span] = p.mul_(is_scored[:, span])
    return nll, errors
