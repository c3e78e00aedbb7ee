"""The causal scan over S and z: in chunks for many tokens, in one step for one, and the definition both must equal.

    S_t = g_t S_(t-1) + fk_t v_t^T      z_t = g_t z_(t-1) + fk_t      y_t = fq_t S_t / fq_t . z_t

B batch, H heads, T time, F features, E value width, N chunks, C tokens in a chunk. `fq` and `fk` are queries and keys
after their feature map, not negative; g_t = exp(log_decay_t), and 0 where a document starts.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 64
"""Tokens in a chunk: within it the past is a masked product, between chunks it is the state."""

SPAN = 1024
"""Tokens whose chunks are worked on at once; longer texts go span by span, so that temporaries stay in cache."""

SMALLEST = 1e-30
"""A denominator below this is taken for this, so that nothing is ever divided by 0."""


class ScanState(NamedTuple):
    S: Tensor  # (B, H, F, E) sum of fk v^T, float32 or more
    z: Tensor  # (B, H, F)    sum of fk, float32 or more


def quadratic(
    fq: Tensor, fk: Tensor, v: Tensor, starts: Tensor | None = None, log_decay: Tensor | None = None
) -> Tensor:
    """The definition: y_t = sum_s<=t w_ts v_s / sum_s<=t w_ts, w_ts = (fq_t . fk_s) g_s+1 ... g_t. Slow; the oracle."""
    time = fq.shape[2]
    weights = fq @ fk.mT
    if log_decay is not None:
        total = log_decay.cumsum(-1)
        weights = weights * (total[..., :, None] - total[..., None, :]).tril().exp().to(weights.dtype)
    reach = torch.ones(time, time, dtype=torch.bool, device=fq.device).tril()
    if starts is not None:
        document = starts.cumsum(1)
        reach = reach & (document[:, None, :, None] == document[:, None, None, :])
    weights = weights.masked_fill(~reach, 0)
    return weights @ v / weights.sum(-1, keepdim=True)


def step(
    fq: Tensor,
    fk: Tensor,
    v: Tensor,
    state: ScanState,
    starts: Tensor | None = None,
    log_decay: Tensor | None = None,
) -> tuple[Tensor, ScanState]:
    """One token (T = 1) by the recurrence itself."""
    precise = state.S.dtype
    S, z = state
    if log_decay is not None:
        keep = log_decay.to(precise).exp()  # (B, H, 1)
        S, z = S * keep[..., None], z * keep
    if starts is not None:
        forget = starts[:, :, None]  # (B, 1, 1)
        S, z = S.masked_fill(forget[..., None], 0), z.masked_fill(forget, 0)
    fq_now, fk_now = fq[:, :, 0].to(precise), fk[:, :, 0].to(precise)
    S = S + fk_now[..., :, None] * v.to(precise)
    z = z + fk_now
    numerator = (fq_now[..., None, :] @ S)[..., 0, :]
    denominator = (fq_now * z).sum(-1, keepdim=True).clamp_min(SMALLEST)
    return (numerator / denominator).to(v.dtype)[:, :, None], ScanState(S, z)


def prefill(
    fq: Tensor,
    fk: Tensor,
    v: Tensor,
    state: ScanState,
    starts: Tensor | None = None,
    log_decay: Tensor | None = None,
) -> tuple[Tensor, ScanState]:
    """Any number of tokens: what folding `step` over them gives, in products of matrices."""
    outputs, after = [], state
    for numerator, denominator, after in _spans(fq, fk, v, state, starts, log_decay):  # noqa: B007
        outputs.append((numerator / denominator.clamp_min(SMALLEST)[..., None]).to(v.dtype))
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)), after


def denominators(
    fq: Tensor,
    fk: Tensor,
    v: Tensor,
    state: ScanState,
    starts: Tensor | None = None,
    log_decay: Tensor | None = None,
) -> Tensor:
    """What `prefill` divides by, (B, H, T): the sum of all weights, which must not come near 0."""
    return torch.cat([sums[1] for sums in _spans(fq, fk, v, state, starts, log_decay)], dim=2)


def _spans(
    fq: Tensor, fk: Tensor, v: Tensor, state: ScanState, starts: Tensor | None, log_decay: Tensor | None
) -> Iterator[tuple[Tensor, Tensor, ScanState]]:
    """Numerators (B, H, T, E), denominators (B, H, T) and the state after, span by span."""
    # split, not slices: the gradient of a slice is as long as the whole, so a loop of them would be quadratic
    parts = [x.split(SPAN, dim=2) for x in (fq, fk, v)]
    spans = len(parts[0])
    parts.append((None,) * spans if log_decay is None else log_decay.split(SPAN, dim=2))
    starts_of = (None,) * spans if starts is None else starts.split(SPAN, dim=1)
    for fq_part, fk_part, v_part, decay_part, starts_part in zip(*parts, starts_of, strict=True):
        numerator, denominator, state = _span(fq_part, fk_part, v_part, state, starts_part, decay_part)
        yield numerator, denominator, state


def _span(
    fq: Tensor, fk: Tensor, v: Tensor, state: ScanState, starts: Tensor | None, log_decay: Tensor | None
) -> tuple[Tensor, Tensor, ScanState]:
    """All chunks of one span side by side, joined by the states at their borders."""
    time, precise = fq.shape[2], state.S.dtype
    fq, fk, v = (_in_chunks(x, axis=2) for x in (fq, fk, v))  # (B, H, N, C, ...)
    total = _decay_since_border(log_decay, fq, precise)
    document = _documents(starts, fq)

    within = _reach(total, document).to(fq.dtype)  # (..., N, C, C)
    weights = (fq @ fk.mT) * within
    numerator = weights @ v
    denominator = weights.sum(-1, dtype=precise)

    last_total, last_document = total[..., -1:], document[..., -1:]
    survives = (last_total - total).exp() * (document == last_document)  # of each token, to the end of its chunk
    fk_left = fk * survives[..., None].to(fk.dtype)
    before, after = _border_states(
        ScanState((fk_left.mT @ v).to(precise), fk_left.sum(-2, dtype=precise)), state, last_total, last_document
    )
    previous = torch.cat([torch.zeros_like(last_document[:, :, :1]), last_document[:, :, :-1]], dim=2)
    seen = total.exp() * (document == previous)  # of the state at the chunk's border, at each token
    numerator = numerator + (fq @ before.S.to(fq.dtype)) * seen[..., None].to(fq.dtype)
    denominator = denominator + (fq.to(precise) @ before.z[..., None])[..., 0] * seen

    return numerator.flatten(2, 3)[:, :, :time], denominator.flatten(2, 3)[:, :, :time], after


def _border_states(
    local: ScanState, carried: ScanState, total: Tensor, document: Tensor
) -> tuple[ScanState, ScanState]:
    """The states before each chunk (B, H, N, ...) and after the last, from what each chunk adds and what came in.

    The state that came in is one more chunk, the first: it belongs to document 0 and has decayed by nothing.
    """
    total = torch.cat([torch.zeros_like(total[:, :, :1, 0]), total[..., 0].cumsum(-1)], dim=-1)
    document = torch.cat([torch.zeros_like(document[:, :, :1, 0]), document[..., 0]], dim=-1)
    reach = _reach(total, document).to(carried.S.dtype)  # (B, H, 1 + N, 1 + N)
    S = torch.cat([carried.S[:, :, None], local.S], dim=2)
    z = torch.cat([carried.z[:, :, None], local.z], dim=2)
    S, z = (reach @ S.flatten(3)).view(S.shape), reach @ z
    # cloned, for a view would keep the states of all chunks alive
    return ScanState(S[:, :, :-1], z[:, :, :-1]), ScanState(S[:, :, -1].clone(), z[:, :, -1].clone())


def _reach(total: Tensor, document: Tensor) -> Tensor:
    """What is left at place t of what was added at place s <= t: exp(total_t - total_s) within a document, else 0."""
    places = total.shape[-1]
    allowed = torch.ones(places, places, dtype=torch.bool, device=total.device).tril()
    allowed = allowed & (document[..., :, None] == document[..., None, :])
    # masked before the exponential: differences of the future are positive and could overflow
    difference = (total[..., :, None] - total[..., None, :]).masked_fill(~allowed, 0)
    return difference.exp() * allowed


def _in_chunks(x: Tensor, axis: int) -> Tensor:
    """Split an axis of time into chunks of equal length, padded with zeros (which add nothing to any state)."""
    time = x.shape[axis]
    chunk = min(CHUNK, time)
    missing = -time % chunk
    if missing:
        x = torch.cat([x, x.new_zeros(*x.shape[:axis], missing, *x.shape[axis + 1 :])], dim=axis)
    return x.unflatten(axis, (-1, chunk))


def _decay_since_border(log_decay: Tensor | None, like: Tensor, dtype: torch.dtype) -> Tensor:
    """The log decay from the start of its chunk to each token, (B, H, N, C); zeros that broadcast if there is none."""
    if log_decay is None:
        return torch.zeros(1, 1, *like.shape[2:4], dtype=dtype, device=like.device)
    return _in_chunks(log_decay.to(dtype), axis=2).cumsum(-1)


def _documents(starts: Tensor | None, like: Tensor) -> Tensor:
    """The number of documents begun in this span up to each token, (B, 1, N, C); 0 is the one that came in."""
    if starts is None:
        return torch.zeros(1, 1, *like.shape[2:4], dtype=torch.long, device=like.device)
    padding = -starts.shape[1] % like.shape[3]
    document = torch.nn.functional.pad(starts, (0, padding)).cumsum(1)
    return document.view(len(starts), 1, *like.shape[2:4])
