"""Cross-entropy over a large vocabulary, chunk by chunk, so that the logits of a whole sequence never exist at once.

V vocabulary.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

IGNORED = -100
"""A target that is not scored: padding, and the target of the last token of a document."""

LOGITS_CHUNK = 512
"""Most tokens whose logits exist at the same time."""

CPU_LOGITS = 2**22
"""Most logits at a time on a CPU: of more than 32 MiB malloc hands out fresh pages each time, which takes longer
than the arithmetic."""


class Softening(NamedTuple):
    """How a student learns the predictions of a teacher."""

    share: float  # of the teacher's distribution in the loss; the rest is the text's
    temperature: float


class TeacherOutput(NamedTuple):
    """What a student learns of a teacher's predictions for a batch."""

    hidden: Tensor  # (B, T, width) the teacher's last hidden states
    weight: Tensor  # (V, width) of its output layer
    softening: Softening


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


def distilled_nll(
    hidden: Tensor, weight: Tensor, targets: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, soft: Softening
) -> Tensor:
    """Return (2,): the loss of a student, and beside it, without a gradient, the summed -log p of its targets.

    The loss mixes this with the divergence of the student's distribution from the teacher's, KL(teacher | student) at a
    temperature, times its square, so that its gradient does not shrink with it (Hinton et al. 2015). The teacher's is
    that of its own hidden states and weight.
    """
    flat = (hidden.flatten(0, -2), weight, targets.flatten())
    return _DistilledNLL.apply(*flat, teacher_hidden.flatten(0, -2), teacher_weight, soft, torch.is_grad_enabled())


class _SummedNLL(torch.autograd.Function):
    """Summed NLL with gradients computed in the forward pass, so that no logits are saved or computed twice."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, needs_grad: bool) -> Tensor:
        output = weight.to(hidden.dtype)
        gradients = _Gradients.of(hidden, output, needs_grad and any(ctx.needs_input_grad))
        total = torch.zeros((), device=hidden.device, dtype=torch.promote_types(hidden.dtype, torch.float32))
        for piece in _pieces(hidden, weight):
            logits = logits_in_float32(hidden[piece], output)
            nll, log_total = _chunk_nll(logits, targets[piece])
            total += nll.sum()
            if gradients:
                gradients.add(piece, _dnll(logits, log_total, targets[piece]))
        _save(ctx, weight, gradients)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *_scaled(ctx, grads[0]), None, None


class _DistilledNLL(torch.autograd.Function):
    """The same with a teacher."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        theirs: Tensor,
        their_weight: Tensor,
        soft: Softening,
        needs_grad: bool,
    ) -> Tensor:
        output, their_output = weight.to(hidden.dtype), their_weight.to(theirs.dtype)
        gradients = _Gradients.of(hidden, output, needs_grad and any(ctx.needs_input_grad))
        share, temperature = soft
        totals = torch.zeros(2, device=hidden.device, dtype=torch.promote_types(hidden.dtype, torch.float32))
        for piece in _pieces(hidden, weight):
            logits, scored = logits_in_float32(hidden[piece], output), (targets[piece] != IGNORED)[:, None]
            nll, log_total = _chunk_nll(logits, targets[piece])
            ours = _log_softmax(logits / temperature)
            taught = _log_softmax(logits_in_float32(theirs[piece], their_output).div_(temperature))
            theirs_probs = taught.exp()
            divergence = torch.linalg.vecdot(theirs_probs, taught.sub_(ours))[:, None].where(scored, 0).sum()
            totals += torch.stack([(1 - share) * nll.sum() + share * temperature**2 * divergence, nll.sum()])
            if gradients:
                dlogits = ours.exp_().sub_(theirs_probs).mul_(scored * (share * temperature))
                if share < 1:
                    dlogits.add_(_dnll(logits, log_total, targets[piece]), alpha=1 - share)
                gradients.add(piece, dlogits)
        _save(ctx, weight, gradients)
        return totals

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *_scaled(ctx, grads[0][0]), None, None, None, None, None


class _Gradients(NamedTuple):
    """The gradients of a loss for hidden states and the output weight, added up piece by piece."""

    hidden: Tensor
    weight: Tensor
    inputs: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, hidden: Tensor, weight: Tensor, wanted: bool) -> "_Gradients | None":
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        return (
            cls(torch.empty_like(hidden), torch.zeros_like(weight, dtype=dtype), (hidden, weight)) if wanted else None
        )

    def add(self, piece: slice, dlogits: Tensor) -> None:
        hidden, weight = self.inputs[0][piece], self.inputs[1]
        dlogits = dlogits.to(hidden.dtype)
        self.hidden[piece] = dlogits @ weight
        self.weight.add_(dlogits.mT @ hidden)


def _pieces(hidden: Tensor, weight: Tensor) -> Iterator[slice]:
    chunk = min(LOGITS_CHUNK, max(CPU_LOGITS // len(weight), 1)) if hidden.device.type == "cpu" else LOGITS_CHUNK
    for begin in range(0, len(hidden), chunk):
        yield slice(begin, begin + chunk)


def _log_softmax(logits: Tensor) -> Tensor:
    """Return log(softmax(logits)), in their memory."""
    return logits.sub_(logits.logsumexp(-1, keepdim=True))


def _dnll(logits: Tensor, log_total: Tensor, targets: Tensor) -> Tensor:
    """Return the gradient of the NLL for the logits, in their memory."""
    scored = targets != IGNORED
    dlogits = logits.sub_(log_total[:, None]).exp_()  # softmax
    dlogits[torch.arange(len(targets), device=targets.device), targets.where(scored, 0)] -= 1
    return dlogits.mul_(scored[:, None])


def _save(ctx: Any, weight: Tensor, gradients: _Gradients | None) -> None:
    ctx.save_for_backward(*(gradients[:2] if gradients else (None, None)))
    ctx.weight_dtype = weight.dtype


def _scaled(ctx: Any, dtotal: Tensor) -> tuple[Tensor, Tensor]:
    dhidden, dweight = ctx.saved_tensors
    return dhidden * dtotal.to(dhidden.dtype), (dweight * dtotal).to(ctx.weight_dtype)


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
