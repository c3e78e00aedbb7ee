"""A decay for each channel within chunks: sums over pairs of tokens that a single matrix product cannot compute.

    P_ts = sum_f fq_tf fk_sf E_tsf,  E_tsf = g_(s+1)f ... g_tf   for s <= t

E is a matrix for each feature. For a token m between s and t, it is the product of the decay from s to m and the decay
from m to t. So the chunk is halved recursively, until a middle m has separated each pair of tokens. Both factors are
products of decays and therefore at most 1. E is 1 for s = t.

N chunks, B batch, H heads, C tokens in a chunk, F features.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from lmlong.attention.chunks import MIN_LOG2_DECAY, Decay, add_matmul, decay_masks, to_chunks
from lmlong.attention.device_policy import DevicePolicy
from lmlong.attention.scan import Span


def channel_decay_masks(x: Span, dtype: torch.dtype, state_dtype: torch.dtype, policy: DevicePolicy) -> Decay:
    """Return the decay masks by channel of a span, from its document starts and log decays (B, H, T, F)."""
    assert x.log_decay is not None
    log2_decay = to_chunks(x.log_decay.to(state_dtype) / math.log(2))
    of_documents = decay_masks(x._replace(log_decay=None), dtype, state_dtype, policy)
    from_state = _exp2(log2_decay.cumsum(-2))
    if of_documents.from_state is not None:
        from_state *= of_documents.from_state
    chunk, from_state = from_state[..., -1, :, None].clone(), from_state.to(dtype)  # a view would keep all alive
    to_end = _exp2(_sum_after(log2_decay))
    if of_documents.to_end is not None:
        to_end *= of_documents.to_end
    to_end = to_end.to(dtype)
    pairs = [pair.to(dtype) for pair in _pairs(log2_decay)]
    return Decay(of_documents.mask, from_state, to_end, chunk, pairs)


def _pairs(log2_decay: Tensor) -> Iterator[Tensor]:
    """Iterate over the factors of E (N, B, H, C, F), from the largest halves to the smallest: for a token in a first
    half, the decay from it to the end of that half; for a token in a second half, the decay from there to it."""
    size = log2_decay.shape[-2] // 2
    while size:
        first, second = log2_decay.unflatten(-2, (-1, 2, size)).unbind(-3)
        yield _exp2(torch.stack([_sum_after(first), second.cumsum(-2)], dim=-3)).flatten(-4, -2)
        size //= 2


def _sum_after(x: Tensor) -> Tensor:
    """Return the sum over all later tokens, for each token."""
    return pad(x[..., 1:, :], (0, 0, 0, 1)).flip(-2).cumsum(-2).flip(-2)


def pair_products(fq: Tensor, fk: Tensor, pairs: Sequence[Tensor] | None) -> Tensor:
    """Return P (..., C, C); entries with s > t are arbitrary. Without `pairs`, E is 1."""
    if pairs is None:
        return fq @ fk.mT
    products = torch.diag_embed((fq * fk).sum(-1))
    for size, pair in _by_size(pairs):
        _corners(products, size).copy_(_second(fq * pair, size) @ _first(fk * pair, size).mT)
    return products


def add_keys(total: Tensor, A: Tensor, fk: Tensor, pairs: Sequence[Tensor] | None) -> Tensor:
    """Add sum_s A_ts E_ts fk_s to `total` (N, B, H, C, F), for A (N, B, H, C, C)."""
    if pairs is None:
        return add_matmul(total, A, fk)
    total.addcmul_(A.diagonal(dim1=-2, dim2=-1)[..., None], fk)
    for size, pair in _by_size(pairs):
        _second(total, size).addcmul_(_corners(A, size) @ _first(fk * pair, size), _second(pair, size))
    return total


def add_queries(total: Tensor, A: Tensor, fq: Tensor, pairs: Sequence[Tensor] | None) -> Tensor:
    """Add sum_t A_ts E_ts fq_t to `total` (N, B, H, C, F)."""
    if pairs is None:
        return add_matmul(total, A.mT, fq)
    total.addcmul_(A.diagonal(dim1=-2, dim2=-1)[..., None], fq)
    for size, pair in _by_size(pairs):
        _first(total, size).addcmul_(_corners(A, size).mT @ _second(fq * pair, size), _first(pair, size))
    return total


def _by_size(pairs: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """Iterate over the factors with the size of their halves."""
    for halvings, pair in enumerate(pairs, 1):
        yield pair.shape[-2] >> halvings, pair


def _first(x: Tensor, size: int) -> Tensor:
    """Return the first halves (..., C / 2 size, size, F) of x (..., C, F)."""
    return x.unflatten(-2, (-1, 2, size))[..., 0, :, :]


def _second(x: Tensor, size: int) -> Tensor:
    return x.unflatten(-2, (-1, 2, size))[..., 1, :, :]


def _corners(x: Tensor, size: int) -> Tensor:
    """Return the blocks (..., C / 2 size, size, size) of x (..., C, C) whose rows are a second half and whose columns
    are the first half before it."""
    blocks = x.unflatten(-2, (-1, 2 * size)).unflatten(-1, (-1, 2 * size)).diagonal(dim1=-4, dim2=-2)
    return blocks[..., size:, :size, :].movedim(-1, -3)


def _exp2(exponent: Tensor) -> Tensor:
    """Return the power in place."""
    return exponent.clamp_(min=MIN_LOG2_DECAY).exp2_()
