"""The definition of learning while reading, for one document. N positions, V vocabulary."""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from lmlong.model.learning.state import BLOCK, SCALE_RATE, Delta, Rates, keys_of


def naive_read(
    weight: Tensor, delta: Delta, hidden: Tensor, targets: Tensor, is_learned: Tensor, rates: Rates
) -> tuple[Tensor, Delta]:
    """Return -log p (N,) of the token after each position, and what was learned from all blocks before the last.

    `weight` (V, width) is that of the output layer, `delta` what was learned before, without a batch dimension,
    `hidden` (N, width) the last hidden state at each position, from the first of a block on, and `targets` (N,) the
    token after it, from which the layer learns if `is_learned` (N,).
    """
    D, bias, squares, (scale, next_scale), slopes = delta
    nll, keys = [], keys_of(hidden, D)
    for block in torch.arange(len(hidden)).split(BLOCK):
        change = keys[block] @ D.mT + bias
        logits = hidden[block] @ weight.mT + scale * change
        nll.append(cross_entropy(logits, targets[block], reduction="none"))
        if block[-1] < len(hidden) - 1:
            errors = (logits.softmax(-1) - one_hot(targets[block], len(weight))) * is_learned[block, None]
            squares = squares + errors.square().sum(0)
            share = (1 + squares / rates.prior).rsqrt()  # of the rates, for each token's row
            slope = (errors * change).sum()  # of the loss, by the scale
            slopes = slopes + slope**2
            scale, next_scale = next_scale, (next_scale - SCALE_RATE * slope * slopes.rsqrt()).clamp(0, 1)
            D = D - rates.rate * share[:, None] * (errors.mT @ keys[block])
            bias = bias - rates.bias_rate * share * errors.sum(0)
    return torch.cat(nll), Delta(D, bias, squares, torch.stack([scale, next_scale]), slopes)
