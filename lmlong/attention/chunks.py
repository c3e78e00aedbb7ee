"""The causal scan over one span of tokens, all its chunks side by side, and its gradient.

Each v has a last number 1, so that z is the last column of S, and the denominator the last number of what is read:

    W_ts = g_(s+1) ... g_t      P_ts = (fq_t . fk_s) W_ts
    n_t = sum_s P_ts v_s + a_t S^T fq_t                     S' = r S + sum_s u_s fk_s v_s^T

over the tokens s <= t of a chunk, S before it and S' after it. Left of S are a_t at token t and r at the end of the
chunk, and u_s is left of token s there. With dx for the gradient of x, and A_ts = (dn_t . v_s) W_ts,

    dfq_t = sum_s A_ts fk_s + a_t S dn_t                    dv_s = sum_t P_ts dn_t + u_s dS'^T fk_s
    dfk_s = sum_t A_ts fq_t + u_s dS' v_s                   dS = r dS' + sum_t a_t fq_t dn_t^T

P_ts dP_ts is a part of fq_t . dfq_t and of fk_s . dfk_s alike, and of the gradient of each log g between s and t. So

    dlog g_t = sum_(i >= t) (fq_i . dfq_i - fk_i . dfk_i) + <S', dS'>

N chunks, B batch, H heads, C tokens in a chunk, F features, E value width.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

CHUNK = 64
"""Tokens in a chunk: within it the past is a masked product, between chunks it is the state."""

FAINTEST = -100.0
"""Powers of 2 below this are taken for this: it is nothing beside a token's own weight, and no slow denormal number."""


class Chunks(NamedTuple):
    """The tokens of a span; the last chunk is filled up with zeros, which add nothing to any state."""

    fq: Tensor  # (N, B, H, C, F)
    fk: Tensor  # (N, B, H, C, F)
    v: Tensor  # (N, B, H, C, E)


class Reach(NamedTuple):
    """What is left of what, (N, B or 1, H or 1, ...); None where all is."""

    within: Tensor | None  # W (..., C, C)
    seen: Tensor | None  # a (..., C, 1)
    survives: Tensor | None  # u (..., C, 1)
    kept: Tensor | None  # r (..., 1, 1), in the type of the states


class Slopes(NamedTuple):
    """The gradients of all that went into a span."""

    fq: Tensor  # (N, B, H, C, F)
    fk: Tensor  # (N, B, H, C, F)
    v: Tensor  # (N, B, H, C, E)
    log_decay: Tensor | None  # (N, B, H, C)
    S: Tensor  # (B, H, F, E + 1)


def in_chunks(x: Tensor) -> Tensor:
    """(B, H, T, ...) -> (N, B, H, C, ...), in one piece."""
    chunk = min(CHUNK, x.shape[2])
    missing = -x.shape[2] % chunk
    if missing:
        x = pad(x, (*(0, 0) * (x.ndim - 3), 0, missing))
    return x.unflatten(2, (-1, chunk)).movedim(2, 0).contiguous()


def put(into: Tensor, x: Tensor) -> None:
    """Write chunks (N, B, H, C, ...) to their places in a line (B, H, T, ...)."""
    chunk = x.shape[3]
    whole, rest = divmod(into.shape[2], chunk)
    into[:, :, : whole * chunk].unflatten(2, (whole, chunk)).copy_(x[:whole].movedim(0, 2))
    if rest:
        into[:, :, whole * chunk :] = x[whole, :, :, :rest]


def find_reach(starts: Tensor | None, log_decay: Tensor | None, product: torch.dtype, sums: torch.dtype) -> Reach:
    """From the starts (B, T) and log decays (B, H, T) of a span."""
    within = seen = None
    if log_decay is not None:
        # powers of 2, which torch computes three times as fast as those of e
        total = in_chunks(log_decay.to(sums) / math.log(2)).cumsum(-1)
        # clamped before the power: differences to the future are positive and could overflow
        within = (total[..., :, None] - total[..., None, :]).clamp_(FAINTEST, 0).exp2_()
        seen = total.clamp_(min=FAINTEST).exp2_()
    # a look at the starts costs a CPU nothing, but would make it wait for a GPU
    if starts is not None and (starts.device.type != "cpu" or bool(starts.any())):
        begun = in_chunks(starts[:, None].to(sums))
        before = begun.sum(-1, keepdim=True).cumsum(0) - begun.sum(-1, keepdim=True)
        document = before + begun.cumsum(-1)  # documents begun in this span up to each token
        same, carried = (document[..., :, None] == document[..., None, :]).to(sums), (document == before).to(sums)
        within = same if within is None else within.mul_(same)
        seen = carried if seen is None else seen.mul_(carried)
    if within is None or seen is None:
        return Reach(None, None, None, None)
    survives, kept = within[..., -1, :, None], seen[..., -1:, None]
    return Reach(within.to(product).tril_(), seen[..., None].to(product), survives.to(product), kept)


def find_borders(x: Chunks, reach: Reach, S: Tensor) -> Tensor:
    """From the state before the span, (B, H, F, E + 1), to those before each chunk and after the last, (N + 1, ...)."""
    borders = S.new_empty(len(x.v) + 1, *S.shape)
    left = x.fk if reach.survives is None else x.fk * reach.survives
    borders[0] = S
    borders[1:, ..., :-1] = left.mT @ x.v
    borders[1:, ..., -1] = left.sum(-2, dtype=S.dtype)  # exact where products round
    return _carried(borders, reach.kept)


def read(x: Chunks, reach: Reach, borders: Tensor) -> tuple[Tensor, Tensor]:
    """Numerators (N, B, H, C, E) and denominators (N, B, H, C)."""
    seen = x.fq if reach.seen is None else x.fq * reach.seen
    S, z = borders[:-1, ..., :-1].to(seen.dtype), borders[:-1, ..., None, :, -1].contiguous()
    weights = _masked(x.fq @ x.fk.mT, reach)
    denominator = (seen * z).sum(-1)
    return _plus_product(seen @ S, weights, x.v), denominator + weights.sum(-1, dtype=denominator.dtype)


def find_slopes(x: Chunks, reach: Reach, borders: Tensor, dn: Tensor, dS: Tensor, decays: bool) -> Slopes:
    """From the gradients of what was read, dn (N, B, H, C, E + 1), and of the state after the last chunk."""
    v = pad(x.v, (0, 1), value=1)
    dn_seen = dn if reach.seen is None else dn * reach.seen
    S_slopes = _carried(torch.cat([x.fq.mT @ dn_seen, dS[None]]), reach.kept, backwards=True)
    S_after = S_slopes[1:].to(dn.dtype)
    fk_slopes, v_slopes = v @ S_after.mT, x.fk @ S_after[..., :-1]
    if reach.survives is not None:
        fk_slopes, v_slopes = fk_slopes.mul_(reach.survives), v_slopes.mul_(reach.survives)
    A = _masked(dn @ v.mT, reach)
    fq_slopes = _plus_product(dn_seen @ borders[:-1].to(dn.dtype).mT, A, x.fk)
    fk_slopes = _plus_product(fk_slopes, A.mT, x.fq)
    weights = _masked(x.fq @ x.fk.mT, reach)
    v_slopes = _plus_product(v_slopes, weights.mT, dn[..., :-1])
    log_decay_slopes = None
    if decays:
        pairs = (x.fq * fq_slopes).sum(-1, dtype=dS.dtype) - (x.fk * fk_slopes).sum(-1, dtype=dS.dtype)
        log_decay_slopes = pairs.flip(-1).cumsum(-1).flip(-1) + (borders[1:] * S_slopes[1:]).sum((-1, -2))[..., None]
    return Slopes(fq_slopes, fk_slopes, v_slopes, log_decay_slopes, S_slopes[0])


def _carried(borders: Tensor, kept: Tensor | None, backwards: bool = False) -> Tensor:
    """Add to each place what is kept of the place before it; backwards, of the place after it."""
    places = borders.unbind()
    steps = range(len(places) - 1)
    for n in reversed(steps) if backwards else steps:
        here, there = (places[n], places[n + 1]) if backwards else (places[n + 1], places[n])
        here.add_(there if kept is None else there * kept[n])
    return borders


def _masked(weights: Tensor, reach: Reach) -> Tensor:
    return weights.tril_() if reach.within is None else weights.mul_(reach.within)


def _plus_product(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    total.flatten(0, 2).baddbmm_(left.flatten(0, 2), right.flatten(0, 2))
    return total
