"""Cross-entropy over a large vocabulary, chunk by chunk, so that the logits of a whole sequence never exist at once."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

IGNORED = -100
"""A target that is not scored: padding, and what follows the end of a document."""

CHUNK = 512
"""Tokens whose logits exist at the same time."""


def summed_nats(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The sum of -log p(target) over scored targets: hidden (..., width), weight (vocabulary, width), targets (...)."""
    # told from outside: within a function of autograd gradients are never on, whatever is wanted of it
    return _SummedNats.apply(hidden.flatten(0, -2), weight, targets.flatten(), torch.is_grad_enabled())


def nats(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """-log p(target) of each target, 0 where it is ignored; no gradient."""
    scored = targets != IGNORED
    pieces = zip(hidden[scored].split(CHUNK), targets[scored].split(CHUNK), strict=True)
    lost = torch.cat([_chunk_nats(scores(h, weight), t)[0] for h, t in pieces])
    return lost.new_zeros(targets.shape).masked_scatter(scored, lost)


class _SummedNats(torch.autograd.Function):
    """Computes the gradients while the logits of a chunk are at hand, so that none are kept or computed twice."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, learning: bool) -> Tensor:
        total = torch.zeros((), device=hidden.device, dtype=torch.promote_types(hidden.dtype, torch.float32))
        wanted = learning and any(ctx.needs_input_grad)
        hidden_gradient = torch.empty_like(hidden) if wanted else None
        weight_gradient = torch.zeros_like(weight, dtype=total.dtype) if wanted else None
        for begin in range(0, len(hidden), CHUNK):
            h, t = hidden[begin : begin + CHUNK], targets[begin : begin + CHUNK]
            logits = scores(h, weight)
            losses, log_total = _chunk_nats(logits, t)
            total += losses.sum()
            if hidden_gradient is not None and weight_gradient is not None:
                scored = t != IGNORED
                slope = logits.sub_(log_total[:, None]).exp_()  # softmax, in the memory of the logits
                slope[torch.arange(len(t), device=t.device), t.where(scored, 0)] -= 1
                slope = slope.mul_(scored[:, None]).to(h.dtype)
                hidden_gradient[begin : begin + CHUNK] = slope @ weight.to(h.dtype)
                weight_gradient += slope.mT @ h
        ctx.save_for_backward(hidden_gradient, weight_gradient)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden_gradient, weight_gradient = ctx.saved_tensors
        (upstream,) = gradients
        return (
            hidden_gradient * upstream.to(hidden_gradient.dtype),
            (weight_gradient * upstream).to(ctx.weight_dtype),
            None,
            None,
        )


def scores(hidden: Tensor, weight: Tensor) -> Tensor:
    """Logits (..., vocabulary) in float32 at least, whatever type they are multiplied in."""
    product = linear(hidden, weight.to(hidden.dtype))
    return product.to(torch.promote_types(product.dtype, torch.float32))


def _chunk_nats(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """-log p of each target, and the log of the sum of exponentials it was taken from."""
    log_total = logits.logsumexp(-1)
    scored = targets != IGNORED
    chosen = logits.gather(-1, targets.where(scored, 0)[:, None])[:, 0]
    return (log_total - chosen).where(scored, 0), log_total
