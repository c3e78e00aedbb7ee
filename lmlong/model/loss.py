"""Cross-entropy over a large vocabulary, chunk by chunk, so that the logits of a whole sequence never exist at once.

N tokens, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lmlong.attention.compiling import compiled
from lmlong.attention.device_policy import CPU_POLICY, DevicePolicy
from lmlong.attention.products import dtype_of_product, linear
from lmlong.native.rows import kernel as rows

IGNORED = rows.IGNORED
"""A target that is not scored: padding, and the target of the last token of a document."""


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    policy: DevicePolicy = CPU_POLICY,
    compiles: bool = False,
    of_chunk: "ChunkLoss | None" = None,
) -> Tensor:
    """Return the sum of -log p(target) over scored targets, for hidden (..., width), weight (V, width), targets (...).

    With `compiles`, torch.compile makes few passes over the logits of each chunk out of many. `of_chunk` replaces the
    loss of a chunk by another; if it is several numbers, only the first has a gradient.
    """
    # read here, since gradients are always disabled inside an autograd function
    graded, chunk = torch.is_grad_enabled(), _chunk_tokens(len(weight), policy)
    of_chunk = of_chunk or (_compiled_loss if compiles else _native_loss if policy.native_rows else _plain_loss)
    return _ChunkedCrossEntropy.apply(hidden.flatten(0, -2), weight, targets.flatten(), of_chunk, graded, chunk)


def token_nll(
    hidden: Tensor,
    logits: Callable[[Tensor], Tensor],
    vocabulary: int,
    targets: Tensor,
    policy: DevicePolicy = CPU_POLICY,
) -> Tensor:
    """Return -log p of each target, 0 if ignored, given the function from hidden states to logits; without
    gradients."""
    scored = targets != IGNORED
    # to leave out the others, the number of scored targets has to be read
    tokens = (hidden[scored], targets[scored]) if policy.reads_values else (hidden.flatten(0, -2), targets.flatten())
    chunks = zip(*(x.split(_chunk_tokens(vocabulary, policy)) for x in tokens), strict=True)
    nll = torch.cat([nll_and_log_total(logits(h), t)[0] for h, t in chunks])
    return nll.new_zeros(targets.shape).masked_scatter(scored, nll) if policy.reads_values else nll.view(targets.shape)


def logits_in_float32(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return logits (..., V) in at least float32, whatever the dtype of the product."""
    return in_float32(linear(hidden, weight.to(hidden.dtype)))


def in_float32(logits: Tensor) -> Tensor:
    """Return logits in at least float32."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


ChunkLoss = Callable[[Tensor, Tensor, slice, bool], tuple[Tensor, Tensor | None]]
"""(logits (N, V), targets (N,), their span among all tokens, whether gradients are wanted) -> the sums that are the
loss, and the gradient for the logits."""


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The loss, with gradients computed in the forward pass, so that logits are neither saved nor recomputed."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        of_chunk: ChunkLoss,
        graded: bool,
        chunk: int,
    ) -> Tensor:
        dtype = dtype_of_product(hidden)
        vectors, output = hidden.to(dtype), weight.to(dtype)
        sums, dhidden, dweight = [], None, None
        if graded := graded and any(ctx.needs_input_grad):
            dhidden = torch.empty_like(vectors)
            if ctx.needs_input_grad[1]:
                dweight = torch.zeros_like(output, dtype=torch.promote_types(dtype, torch.float32))
        for begin in range(0, max(1, len(hidden)), chunk):
            span = slice(begin, begin + chunk)
            loss, dlogits = of_chunk(linear(vectors[span], output), targets[span], span, graded)
            sums.append(loss)
            if dhidden is not None:
                assert dlogits is not None
                dlogits = dlogits.to(dtype)
                dhidden[span] = dlogits @ output
                if dweight is not None:
                    dweight += dlogits.mT @ vectors[span]
        ctx.save_for_backward(dhidden, dweight)
        ctx.dtypes = hidden.dtype, weight.dtype
        return sum(sums, torch.zeros_like(sums[0]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dhidden, dweight = ctx.saved_tensors
        dloss = grads[0].flatten()[0]
        of_hidden, of_weight = ctx.dtypes
        dweight = None if dweight is None else (dweight * dloss).to(of_weight)
        return dhidden.to(of_hidden) * dloss.to(of_hidden), dweight, None, None, None, None


def _chunk_tokens(vocabulary: int, policy: DevicePolicy) -> int:
    """Return the number of tokens whose logits are computed at once."""
    tokens = max(policy.logits // vocabulary, 1)
    return tokens if policy.logit_tokens is None else min(tokens, policy.logit_tokens)


def nll_and_log_total(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return -log p of each target (N,), and the logsumexp of its logits (N, V)."""
    log_total = logits.logsumexp(-1)
    scored = targets != IGNORED
    chosen = logits.gather(-1, targets.where(scored, 0)[:, None])[:, 0]
    return (log_total - chosen).where(scored, 0), log_total


def nll_gradient(logits: Tensor, log_total: Tensor, targets: Tensor) -> Tensor:
    """Return the gradient of the NLL with respect to the logits, in their memory."""
    scored = targets != IGNORED
    dlogits = logits.sub_(log_total[:, None]).exp_()  # softmax
    dlogits[torch.arange(len(targets), device=targets.device), targets.where(scored, 0)] -= 1
    return dlogits.mul_(scored[:, None])


def _plain_loss(logits: Tensor, targets: Tensor, span: slice, graded: bool) -> tuple[Tensor, Tensor | None]:
    x = in_float32(logits)
    nll, log_total = nll_and_log_total(x, targets)
    return nll.sum(), nll_gradient(x, log_total, targets) if graded else None


def _native_loss(logits: Tensor, targets: Tensor, span: slice, graded: bool) -> tuple[Tensor, Tensor | None]:
    if not rows.can_compute(logits):
        return _plain_loss(logits, targets, span, graded)
    return rows.loss(logits, targets, graded).sum(), logits if graded else None


def _compiled_loss(logits: Tensor, targets: Tensor, span: slice, graded: bool) -> tuple[Tensor, Tensor | None]:
    return compiled(_loss_and_gradient)(logits, targets) if graded else _plain_loss(logits, targets, span, graded)


def _loss_and_gradient(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the summed -log p of the targets (N,), and its gradient for the logits (N, V) in their dtype. Compiled,
    this holds no other numbers of the size of the logits in memory."""
    x = in_float32(logits)
    nll, log_total = nll_and_log_total(x, targets)
    chosen = torch.arange(x.shape[1], device=x.device) == targets[:, None]
    gradient = (x - log_total[:, None]).exp() - chosen.to(x.dtype)
    return nll.sum(), gradient.where((targets != IGNORED)[:, None], 0).to(logits.dtype)
