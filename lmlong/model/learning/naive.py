"""The definition of learning while reading, for one document. T time, V vocabulary."""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from lmlong.model.learning.state import BLOCK, Rates


def naive_read(weight: Tensor, hidden: Tensor, tokens: Tensor, rates: Rates) -> tuple[Tensor, Tensor, Tensor]:
    """Return -log p of all tokens but the first (T - 1,), and D (V, width) and the bias (V,) after them, given the last
    hidden state (T, width) at each of the tokens (T,) and the weight (V, width) of the output layer."""
    D, bias, nll = torch.zeros_like(weight), torch.zeros_like(weight[:, 0]), []
    for h, following in zip(hidden[:-1].split(BLOCK), tokens[1:].split(BLOCK), strict=True):
        logits = h @ (weight + D).mT + bias
        nll.append(cross_entropy(logits, following, reduction="none"))
        if len(following) == BLOCK:
            errors = logits.softmax(-1) - one_hot(following, len(weight))
            D = (1 - rates.decay) * D - rates.rate * errors.mT @ h
            bias = (1 - rates.decay) * bias - rates.bias_rate * errors.sum(0)
    return torch.cat(nll), D, bias
