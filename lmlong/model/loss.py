"""Cross-entropy over a large vocabulary, chunk by chunk, so that the logits of a whole sequence never exist at once.

V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

IGNORED = -100
"""A target that is not scored: padding, and the target of the last token of a document."""

LOGITS_CHUNK = 512
"""Number of tokens whose logits exist at the same time."""


def summed_nll(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of -log p(target) over scored targets: hidden (..., width), weight (V, width), targets (...)."""
    # passed in: within an autograd function gradients are never enabled
    return _SummedNLL.apply(hidden.flatten(0, -2), weight, targets.flatten(), torch.is_grad_enabled())


def token_nll(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return -log p(target) of each target, 0 where it is ignored; without gradients."""
    scored = targets != IGNORED
    pieces = zip(hidden[scored].split(LOGITS_CHUNK), targets[scored].split(LOGITS_CHUNK), strict=True)
    nll = torch.cat([_chunk_nll(logits_in_float32(h, weight), t)[0] for h, t in pieces])
    return nll.new_zeros(targets.shape).masked_scatter(scored, nll)


class _SummedNLL(torch.autograd.Function):
    """Summed NLL with gradients computed in the forward pass, so that no logits are saved or computed twice."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, needs_grad: bool) -> Tensor:
        total = torch.zeros((), device=hidden.device, dtype=torch.promote_types(hidden.dtype, torch.float32))
        wanted = needs_grad and any(ctx.needs_input_grad)
        dhidden = torch.empty_like(hidden) if wanted else None
        dweight = torch.zeros_like(weight, dtype=total.dtype) if wanted else None
        for begin in range(0, len(hidden), LOGITS_CHUNK):
            h, t = hidden[begin : begin + LOGITS_CHUNK], targets[begin : begin + LOGITS_CHUNK]
            logits = logits_in_float32(h, weight)
            nll, log_total = _chunk_nll(logits, t)
            total += nll.sum()
            if dhidden is not None and dweight is not None:
                scored = t != IGNORED
                dlogits = logits.sub_(log_total[:, None]).exp_()  # softmax, in the memory of the logits
                dlogits[torch.arange(len(t), device=t.device), t.where(scored, 0)] -= 1
                dlogits = dlogits.mul_(scored[:, None]).to(h.dtype)
                dhidden[begin : begin + LOGITS_CHUNK] = dlogits @ weight.to(h.dtype)
                dweight += dlogits.mT @ h
        ctx.save_for_backward(dhidden, dweight)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        dhidden, dweight = ctx.saved_tensors
        (dtotal,) = grads
        return dhidden * dtotal.to(dhidden.dtype), (dweight * dtotal).to(ctx.weight_dtype), None, None


def logits_in_float32(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return logits (..., V) in float32 at least, whatever dtype they are multiplied in."""
    logits = linear(hidden, weight.to(hidden.dtype))
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _chunk_nll(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return -log p of each target, and the logsumexp of its logits."""
    log_total = logits.logsumexp(-1)
    scored = targets != IGNORED
    chosen = logits.gather(-1, targets.where(scored, 0)[:, None])[:, 0]
    return (log_total - chosen).where(scored, 0), log_total
