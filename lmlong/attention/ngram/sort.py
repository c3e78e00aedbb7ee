"""n-gram attention over many tokens by torch: tokens are sorted by row, and values are summed in runs of one n-gram.

B batch, H heads, T time, V value dim, R rows.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from lmlong.attention.base import at_least_float32
from lmlong.attention.ngram.hashing import NO_NGRAM, row_of
from lmlong.attention.ngram.state import NgramState, empty_state, rows_at


class _Runs(NamedTuple):
    """Tokens, starting with the token before the first, sorted by the row of the n-gram that ends with each.

    All but `begun` are (B, H, 1 + T); all but `order` and `begun` are in sorted order.
    """

    order: Tensor  # the tokens sorted by row, and by time within a row
    row: Tensor  # the row of each
    begins: Tensor  # whether a run of one n-gram begins
    first: Tensor  # whether it is in the first run of its row, which may continue the row of the state before
    last: Tensor  # whether its value is the last written to a row of the state after
    begun: Tensor  # (B,) whether a document starts in the tokens, which clears the state before


class SortKernel:
    """The lookup of many n-grams by torch."""

    name = "torch"

    @classmethod
    def unavailable_reason(cls, attention: nn.Module, device: torch.device) -> str | None:
        """Return why the kernel cannot compute an attention on a device, or None."""
        return None

    def read(
        self, v: Tensor, hashes: Tensor, document_starts: Tensor | None, state: NgramState
    ) -> tuple[Tensor, Tensor, NgramState]:
        """Return the sum (B, H, T, V) and the number (B, H, T) of the values in the row that each token reads, and the
        state after. The lists of the state must be empty.

        The value of the token after an n-gram is added to its row. Of the tokens that end with one n-gram, in order of
        time, each reads the values that followed the earlier ones.
        """
        written, _ = hashes.unbind(-1)
        buckets = state.number.shape[-1]
        runs, ngrams = _sorted(hashes, document_starts, buckets)
        follows = torch.cat([v.to(state.S.dtype), v.new_ones(v.shape[:3], dtype=state.S.dtype)[..., None]], dim=-1)
        follows = follows.masked_fill((written == NO_NGRAM)[..., None], 0)
        follows = pad(follows, (0, 0, 0, 1)).gather(2, rows_at(runs.order, follows))
        sums, numbers = state.S.gather(2, rows_at(runs.row, state.S)), state.number.gather(2, runs.row)
        carried = torch.cat([sums, numbers[..., None].to(sums.dtype)], dim=-1)
        is_carried = runs.first & (state.ngram.gather(2, runs.row) == ngrams)
        carried = carried.masked_fill(~is_carried[..., None], 0)
        before = torch.where(runs.begins[..., None], carried, follows.roll(1, dims=2))
        before = _SegmentedSum.apply(before, runs.begins.cumsum(-1))
        after = before + follows
        in_time = runs.order.argsort(dim=-1)[..., 1:]
        read = before.gather(2, rows_at(in_time, before)).masked_fill((hashes[..., 1] == NO_NGRAM)[..., None], 0)
        return read[..., :-1], read[..., -1], _state_after(state, runs, ngrams, after)

    def read_alone(
        self, v: Tensor, hashes: Tensor, document_starts: Tensor | None, buckets: int
    ) -> tuple[Tensor, Tensor]:
        """Return the same sums and numbers for a text that begins here, whose state after is not wanted."""
        empty = empty_state((*v.shape[:2], buckets), v.shape[3], v.device, at_least_float32(v.dtype))
        return self.read(v, hashes, document_starts, empty)[:2]


def _sorted(hashes: Tensor, document_starts: Tensor | None, buckets: int) -> tuple[_Runs, Tensor]:
    """Return the runs, and the n-gram of each token in sorted order."""
    written, read = hashes.unbind(-1)
    ngrams = torch.cat([written[..., :1], read], dim=-1)
    writes = pad(written != NO_NGRAM, (0, 1))
    document = torch.zeros_like(ngrams[:, 0])
    if document_starts is not None:
        document = pad(document_starts.long().cumsum(1), (1, 0))
    last = document[:, -1:, None].mT
    rows = row_of(ngrams, buckets)
    document = document[:, None].expand_as(ngrams)
    group, order = torch.where(ngrams == NO_NGRAM, -1, document * buckets + rows).sort(dim=-1, stable=True)
    ngrams, writes, document = (x.gather(-1, order) for x in (ngrams, writes, document))
    new_row = pad(group[..., 1:] != group[..., :-1], (1, 0), value=True)
    begins = new_row | pad(ngrams[..., 1:] != ngrams[..., :-1], (1, 0), value=True)
    run = begins.cumsum(-1)
    of_row = run - torch.where(new_row, run, 0).cummax(-1).values  # the index of the run within its row
    more = pad(writes[..., 1:] & ~new_row[..., 1:], (0, 1))
    has_row = group >= 0
    runs = _Runs(
        order,
        group.clamp_min(0) % buckets,
        begins,
        has_row & (of_row == 0) & (document == 0),
        has_row & writes & ~more & (document == last),
        last[:, 0, 0] > 0,
    )
    return runs, ngrams


def _state_after(state: NgramState, runs: _Runs, ngrams: Tensor, after: Tensor) -> NgramState:
    """Return the state after all tokens, in one copy of the table and without reading a value: how many rows are
    written is not known.

    Rows that are written are cleared first. Each position then adds its value if it is the last of its row, and else 0,
    which changes nothing: the result does not depend on the order of the additions.
    """
    numbers = after[..., -1].detach().to(state.number.dtype)
    begun, other = runs.begun[:, None, None], ~runs.last
    written = torch.zeros_like(state.number).scatter_add_(2, runs.row, runs.last.to(state.number.dtype)) > 0
    cleared = written | begun
    S = state.S.masked_fill(cleared[..., None], 0)
    ngram = state.ngram.masked_fill(begun, NO_NGRAM).masked_fill(written, 0)
    return state._replace(
        S=S.scatter_add_(2, rows_at(runs.row, S), after[..., :-1].masked_fill(other[..., None], 0)),
        number=state.number.masked_fill(cleared, 0).scatter_add_(2, runs.row, numbers.masked_fill(other, 0)),
        ngram=ngram.scatter_add_(2, runs.row, ngrams.masked_fill(other, 0)),
    )


class _SegmentedSum(torch.autograd.Function):
    """The cumulative sums (..., T, V) within segments; segment numbers (..., T) are nondecreasing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, segments: Tensor) -> Tensor:
        ctx.save_for_backward(segments)
        return _segmented_sum(x, segments)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (segments,) = ctx.saved_tensors
        return _segmented_sum(grad.flip(-2), segments.flip(-1)).flip(-2), None


def _segmented_sum(x: Tensor, segments: Tensor) -> Tensor:
    """Sum over 2, 4, 8 ... positions by doubling (Hillis and Steele 1986), so that errors do not grow with T."""
    distance, time = 1, segments.shape[-1]
    while distance < time:
        same = segments[..., distance:] == segments[..., :-distance]
        x = x + pad(x[..., :-distance, :].masked_fill(~same[..., None], 0), (0, 0, distance, 0))
        distance *= 2
    return x
