"""The causal scan over one span of tokens, all its chunks side by side, and its gradient.

    W_ts = g_(s+1) ... g_t          n_t = sum_s P_ts v_s + a_t fq_t S
    P_ts = (fq_t . fk_s) W_ts       m_t = sum_s P_ts + a_t fq_t . z

over the tokens s <= t of a chunk with the state S, z before it; a_t is what is left of that state at token t. After the
chunk, with u_s for what is left of token s at its end, and r for what is left of the state before,

    S' = r S + sum_s u_s fk_s v_s^T    z' = r z + sum_s u_s fk_s

With dx for the gradient of x, and A_ts = (dn_t . v_s + dm_t) W_ts,

    dfq_t = sum_s A_ts fk_s + a_t (S dn_t + z dm_t)    dS = r dS' + sum_t a_t fq_t dn_t^T
    dfk_s = sum_t A_ts fq_t + u_s (dS' v_s + dz')      dz = r dz' + sum_t a_t fq_t dm_t
    dv_s  = sum_t P_ts dn_t + u_s dS'^T fk_s

The share of a pair (t, s) in the loss's slope, P_ts dP_ts, is in fq_t . dfq_t and in fk_s . dfk_s alike, and belongs to
each log g between the two, so

    dlog g_t = sum_(i >= t) (fq_i . dfq_i - fk_i . dfk_i) + <S', dS'> + z' . dz'

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
    kept: Tensor | None  # r (..., 1), in the type of the states


class Borders(NamedTuple):
    """The states before each chunk and after the last."""

    S: Tensor  # (N + 1, B, H, F, E)
    z: Tensor  # (N + 1, B, H, F)


class Slopes(NamedTuple):
    """The gradients of all that went into a span."""

    fq: Tensor
    fk: Tensor
    v: Tensor
    log_decay: Tensor | None  # (N, B, H, C)
    S: Tensor  # (B, H, F, E)
    z: Tensor  # (B, H, F)


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
    survives, kept = within[..., -1, :, None], seen[..., -1:]
    return Reach(within.to(product).tril_(), seen[..., None].to(product), survives.to(product), kept)


def find_borders(x: Chunks, reach: Reach, S: Tensor, z: Tensor) -> Borders:
    """The states (B, H, F, E) and (B, H, F) at the span's start, carried over its chunks."""
    left = _scaled(x.fk, reach.survives)
    kept = reach.kept
    return Borders(
        _carried(S, left.mT @ x.v, None if kept is None else kept[..., None]),
        _carried(z, left.sum(-2, dtype=z.dtype), kept),
    )


def read(x: Chunks, reach: Reach, borders: Borders) -> tuple[Tensor, Tensor]:
    """Numerators n (N, B, H, C, E) and denominators m (N, B, H, C)."""
    seen = _scaled(x.fq, reach.seen)
    weights = _masked(x.fq @ x.fk.mT, reach)
    numerator = _plus_product(seen @ borders.S[:-1].to(seen.dtype), weights, x.v)
    denominator = (seen * borders.z[:-1, ..., None, :]).sum(-1)
    return numerator, denominator + weights.sum(-1, dtype=denominator.dtype)


def find_slopes(
    x: Chunks, reach: Reach, borders: Borders, dn: Tensor, dm: Tensor, dS: Tensor, dz: Tensor, decays: bool
) -> Slopes:
    """From the gradients of numerators, denominators and the states after the last chunk, to those of all inputs."""
    product = x.fq.dtype
    dn, dm = dn.to(product), dm[..., None]
    dn_seen, dm_seen = _scaled(dn, reach.seen), dm if reach.seen is None else dm * reach.seen
    kept = reach.kept
    S_slopes = _carried(dS, x.fq.mT @ dn_seen, None if kept is None else kept[..., None], backwards=True)
    z_slopes = _carried(dz, (x.fq * dm_seen).sum(-2), kept, backwards=True)
    dS_after, dz_after = S_slopes[1:].to(product), z_slopes[1:, ..., None, :].to(product)
    weights = _masked(x.fq @ x.fk.mT, reach)
    A = _masked((dn @ x.v.mT).add_(dm.to(product)), reach)

    fk_slopes = _scaled_((x.v @ dS_after.mT).add_(dz_after), reach.survives)
    v_slopes = _scaled_(x.fk @ dS_after, reach.survives)
    fq_slopes = (dn_seen @ borders.S[:-1].to(product).mT).add_(dm_seen * borders.z[:-1, ..., None, :])
    fq_slopes = _plus_product(fq_slopes, A, x.fk)
    fk_slopes = _plus_product(fk_slopes, A.mT, x.fq)
    v_slopes = _plus_product(v_slopes, weights.mT, dn)
    log_decay_slopes = None
    if decays:
        pairs = (x.fq * fq_slopes).sum(-1, dtype=dm.dtype) - (x.fk * fk_slopes).sum(-1, dtype=dm.dtype)
        beyond = (borders.S[1:] * S_slopes[1:]).sum((-1, -2)) + (borders.z[1:] * z_slopes[1:]).sum(-1)
        log_decay_slopes = pairs.flip(-1).cumsum(-1).flip(-1) + beyond[..., None]
    return Slopes(fq_slopes, fk_slopes, v_slopes, log_decay_slopes, S_slopes[0], z_slopes[0])


def _carried(first: Tensor, added: Tensor, kept: Tensor | None, backwards: bool = False) -> Tensor:
    """(N + 1, ...): `first`, and then what is kept of the place before plus what each chunk adds."""
    borders = torch.cat([added, first[None]] if backwards else [first[None], added]).to(first.dtype)
    places = borders.unbind()
    if backwards:
        places = places[::-1]
    for number in range(len(added)):
        before = places[number]
        if kept is not None:
            before = before * kept[-1 - number if backwards else number]
        places[number + 1].add_(before)
    return borders


def _masked(weights: Tensor, reach: Reach) -> Tensor:
    return weights.tril_() if reach.within is None else weights.mul_(reach.within)


def _scaled(x: Tensor, factor: Tensor | None) -> Tensor:
    return x if factor is None else x * factor


def _scaled_(x: Tensor, factor: Tensor | None) -> Tensor:
    return x if factor is None else x.mul_(factor)


def _plus_product(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    total.flatten(0, 2).baddbmm_(left.flatten(0, 2), right.flatten(0, 2))
    return total
