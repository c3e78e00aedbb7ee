"""Downsampling (hourglass): blocks of tokens, each pooled into one vector, for the layers in the middle to work on.

A document's tokens stand in blocks of F, counted from its start. A token is given what the inner layers make of the
blocks that are full, the one that it fills itself among them, and nothing before the first is full. So nothing leaks.

B batch, T time, F factor, N blocks.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lmlong import recipe
from lmlong.model.block import BlockState, Norm, Place
from lmlong.model.positions import places
from lmlong.model.products import Product
from lmlong.model.states import chosen, joined, row_of

States = tuple[BlockState, ...]
Inner = Callable[[Tensor, States, Place], tuple[Tensor, States]]
"""The inner layers: vectors (B, N, width) and the states before them, to the same after them."""


class HourglassState(NamedTuple):
    """What is remembered beside the states of the inner layers, which move on by full blocks only."""

    tail: Tensor  # (B, F - 1, width) the last vectors, those of the half-filled block at the end
    given: Tensor  # (B, width) what was made of the last full block


class Beat(NamedTuple):
    """How the tokens of one reading fall into blocks: what a machine must know before it begins."""

    blocks: int  # full ones, in the row that may have most
    first: int  # the token that ends the first block
    even: bool  # whether blocks end there in every row, and at each F-th token after it
    fresh: bool  # whether a document's first block may be among them


def beat_of(factor: int, position: Tensor, starts: Tensor | None, time: int) -> Beat:
    """The beat of `time` tokens, the first of them after `position` (B,) others of its document."""
    if starts is None:
        before, regular = position.tolist(), True
    else:
        since = places(starts, position, time)
        steady = (since - since[:, :1] - torch.arange(time, device=since.device)) % factor == 0
        *before, regular = torch.cat([since[:, 0], steady.all()[None]]).tolist()
    phases = {tokens % factor for tokens in before}
    blocks = (max(phases) + time) // factor
    if not blocks:
        return Beat(0, 0, True, False)
    fresh = starts is not None or min(before) < factor
    # of two ways that are as fast for one token only one is taken, so that there are fewer steps to compile
    even = bool(regular) and len(phases) == 1 and not (fresh and time == 1)
    return Beat(blocks, factor - 1 - max(phases) if even else 0, even, fresh)


class Shortening(nn.Module):
    """How blocks become vectors for the inner layers, and what these make of a block becomes what tokens are given."""

    def __init__(self, width: int, options: recipe.Downsample):
        super().__init__()
        self.factor, self.width, self.kind = options.factor, width, options.kind
        self.convolution = Product(self.factor * width, width) if options.kind == "conv" else None
        self.norm = Norm(width)
        self.project_out = Product(width, width)

    def pool(self, blocks: Tensor, real: Tensor | None = None) -> Tensor:
        """(B, N, F, width) -> (B, N, width), of those that are `real` (B or 1, N, F) only, 0 of none; None: of all."""
        if real is not None:
            blank = torch.finfo(blocks.dtype).min if self.kind == "max" else 0
            blocks = blocks.masked_fill(~real[..., None], blank)
        if self.convolution is not None:
            return self.convolution(blocks.flatten(2))
        if self.kind == "max":
            largest = blocks.amax(2)
            return largest if real is None else largest.masked_fill(~real.any(2, keepdim=True), 0)
        return blocks.mean(2) if real is None else blocks.sum(2) / real.sum(2, keepdim=True).clamp(min=1)

    def give(self, made: Tensor) -> Tensor:
        """What the tokens of each block are given (B, N, width), of what the inner layers made of it."""
        return self.project_out(self.norm(made))


class Hourglass(Shortening):
    """Shortens a sequence for the inner layers, lengthens what they make of it, and adds it."""

    def init_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> HourglassState:
        tail = torch.zeros(batch, self.factor - 1, self.width, device=device, dtype=dtype)
        return HourglassState(tail, tail.new_zeros(batch, self.width))

    def prefill(
        self, x: Tensor, state: HourglassState, inside: States, place: Place, beat: Beat, inner: Inner
    ) -> tuple[Tensor, HourglassState, States]:
        """x (B, T, width) after `state`, and after `inside` of the inner layers: the vectors and both states after."""
        seen = torch.cat([state.tail.to(x.dtype), x], dim=1)
        tail = seen[:, x.shape[1] :].clone()  # a view would keep all of them alive
        given = state.given.to(x.dtype)[:, None]
        if not beat.blocks:
            return x + self._to_those_after_a_block(given, place), HourglassState(tail, state.given), inside
        shortened, short_place = self._shorten(seen, place, beat)
        made, after = inner(shortened, inside, short_place)
        given = torch.cat([given, self.give(made).to(x.dtype)], dim=1)  # (B, 1 + N, width)
        if beat.even:
            spread = given.repeat_interleave(self.factor, 1).narrow(1, self.factor - beat.first, x.shape[1])
            last = given[:, -1].clone()
        else:
            rows = torch.arange(len(x), device=x.device)
            ended = (place.positions % self.factor == self.factor - 1).cumsum(1)  # blocks up to each token
            spread, last = given[rows[:, None], ended], given[rows, ended[:, -1]]
            after = self._after_full_blocks(ended[:, -1], shortened, inside, after, short_place, inner)
        return x + self._to_those_after_a_block(spread, place), HourglassState(tail, last), after

    def _to_those_after_a_block(self, given: Tensor, place: Place) -> Tensor:
        """Nothing for tokens of a document of which no block is full: what is left there is of another one."""
        return torch.where((place.positions >= self.factor - 1)[..., None], given, 0)

    def _shorten(self, seen: Tensor, place: Place, beat: Beat) -> tuple[Tensor, Place]:
        """A vector for each block, and where it stands. Where rows have fewer blocks than others, what comes after
        their last is no block, and of no meaning: that it is there lets the work be the same whatever comes later."""
        factor = self.factor
        if beat.even:  # seen[:, t : t + F] is the block that ends at token t
            blocks = seen.narrow(1, beat.first, beat.blocks * factor).unflatten(1, (-1, factor))
            positions = place.positions[:, beat.first :: factor]
        else:
            ends, _ = self.ends(place.positions, beat.blocks)
            rows = torch.arange(len(seen), device=seen.device)[:, None]
            blocks = seen[rows[:, None], ends[..., None] + torch.arange(factor, device=seen.device)]
            positions = place.positions.gather(1, ends)
        positions = positions // factor
        return self.pool(blocks), Place(positions, positions == 0 if beat.fresh else None)

    def ends(self, positions: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
        """The tokens (B, N) that end the first so many blocks of each row, and whether each is one: where there are
        fewer, others follow."""
        full = positions % self.factor == self.factor - 1
        ends = full.int().argsort(dim=1, descending=True, stable=True)[:, :blocks]
        return ends, full.gather(1, ends)

    @staticmethod
    def _after_full_blocks(
        counts: Tensor, shortened: Tensor, before: States, after: States, place: Place, inner: Inner
    ) -> States:
        """The inner states after as many blocks (B,) as each row has: those after all, those before any, and where it
        is neither, read once more."""
        blocks = shortened.shape[1]
        if blocks == 1:
            return chosen(counts == 1, after, before)
        states = []
        for row, count in enumerate(counts.tolist()):
            state = row_of(after if count == blocks else before, row)
            if 0 < count < blocks:
                own = (None if x is None else x[row : row + 1, :count] for x in place)
                state = inner(shortened[row : row + 1, :count], state, Place(*own))[1]  # type: ignore[arg-type]
            states.append(state)
        return joined(states)


def hourglass_of_one(
    x: Tensor, starts: Sequence[int], factor: int, pool: Callable[[Tensor], Tensor], inner: Callable[[Tensor], Tensor]
) -> Tensor:
    """The definition, for one row x (T, width) in which documents begin at `starts`: `pool` makes a vector of a block,
    `inner` of the vectors of a document what is given to its tokens. Slow; the oracle of the tests."""
    parts = []
    for begin, end in zip(starts, [*starts[1:], len(x)], strict=True):
        blocks = [x[at : at + factor] for at in range(begin, end - factor + 1, factor)]
        given = inner(torch.stack([pool(block) for block in blocks])) if blocks else None
        for token in range(begin, end):
            full = (token + 1 - begin) // factor  # blocks of the document up to this token
            parts.append(x[token] + given[full - 1] if full and given is not None else x[token])
    return torch.stack(parts)
