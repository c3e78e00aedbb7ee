"""Hourglass downsampling: blocks of F tokens, each pooled into one vector, for the layers in the middle.

In a language model, blocks are counted from the start of a document. A token gets the middle layers' output for the
last full block up to and including it, and nothing before the first full block, so the future does not leak. In an
encoder, which sees both sides, a token gets the output for its own block.

B batch, T time, F factor, N blocks.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from lmlong import recipe
from lmlong.attention.device_policy import FollowsPolicy
from lmlong.model.block import Block, BlockStates, CallFor, run_blocks
from lmlong.model.layers import Linear, block_norm
from lmlong.model.state import concat_states, state_row, where_state
from lmlong.model.stretch import BlockPhase, Stretch


class HourglassState(NamedTuple):
    """The state of the hourglass. The middle layers, which see only full blocks, have their own states."""

    tail: Tensor  # (B, F - 1, width) the last vectors, including those of the incomplete block
    upsampled: Tensor  # (B, width) the upsampled output of the last full block


class Slots(NamedTuple):
    """Where the blocks of each row are in a batch of N slots, if they do not end evenly.

    A row may have fewer blocks. Its other slots have meaningless vectors, which change the states of the middle layers.

    On a CPU these are the last slots, and the states of such a row are computed again. Where no value is read, it
    depends on the documents that start in the row:

    - none: the last slot at most has no block, and keeps the states before it. If the factor divides the number of
      tokens, every slot has a block.
    - one that has a full block: slots without a block come before the first such block, which clears the states.
    - only documents without a full block: slots without a block are the last, and the states do not matter, since the
      document's first full block clears them in a later call.
    """

    ends: Tensor  # (B, N) the token that ends the block of each slot
    valid: Tensor  # (B, N) whether a slot has a block
    of_token: Tensor  # (B, T) 1 + the slot of the last block up to each token, 0 for the block before the call


class BlockPooling(FollowsPolicy):
    """The pooling of blocks into vectors, and the projection of the middle layers' outputs."""

    def __init__(self, options: recipe.Model):
        super().__init__()
        assert options.downsample is not None
        self.factor, self.kind = options.downsample.factor, options.downsample.kind
        self.width = width = options.width
        self.convolution = Linear(self.factor * width, width) if self.kind == "conv" else None
        self.norm = block_norm(options)
        self.out_proj = Linear(width, width)

    def pool(self, blocks: Tensor, mask: Tensor | None = None) -> Tensor:
        """Pool blocks (B, N, F, width) to (B, N, width), over tokens where `mask` (B or 1, N, F) is true. A block
        without such tokens is 0."""
        if mask is not None:
            blank = torch.finfo(blocks.dtype).min if self.kind == "max" else 0
            blocks = blocks.masked_fill(~mask[..., None], blank)
        if self.convolution is not None:
            return self.convolution(blocks.flatten(2))
        if self.kind == "max":
            largest = blocks.amax(2)
            return largest if mask is None else largest.masked_fill(~mask.any(2, keepdim=True), 0)
        return blocks.mean(2) if mask is None else blocks.sum(2) / mask.sum(2, keepdim=True).clamp(min=1)

    def project(self, x: Tensor) -> Tensor:
        """Project the outputs of the middle layers (B, N, width), to be added to the tokens."""
        return self.out_proj(self.norm(x))


class Hourglass(BlockPooling):
    """Downsampling of a sequence for the middle layers, and upsampling of their outputs, which are added."""

    def init_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> HourglassState:
        tail = torch.zeros(batch, self.factor - 1, self.width, device=device, dtype=dtype)
        return HourglassState(tail, tail.new_zeros(batch, self.width))

    def forward(
        self,
        x: Tensor,
        state: HourglassState,
        stretch: Stretch,
        middle: Sequence[Block],
        states: BlockStates,
        call_for: CallFor,
    ) -> tuple[Tensor, HourglassState, BlockStates]:
        """Return x (B, T, width) plus the outputs of the `middle` layers, the hourglass state after, and the middle
        layers' states after."""
        phase = stretch.phase
        assert phase is not None
        seen = torch.cat([state.tail.to(x.dtype), x], dim=1)
        tail = seen[:, x.shape[1] :].clone()  # a view would keep all of `seen` alive
        upsampled = state.upsampled.to(x.dtype)[:, None]
        if not phase.blocks:
            x = x + self._after_first_block(upsampled, stretch)
            return x, HourglassState(tail, state.upsampled), states
        pooled, of_blocks, slots = self._downsample(seen, stretch, phase)
        y, after = self._run_middle(pooled, states, of_blocks, slots, middle, call_for)
        upsampled = torch.cat([upsampled, self.project(y).to(x.dtype)], dim=1)  # (B, 1 + N, width)
        if phase.even:
            spread = upsampled.repeat_interleave(self.factor, 1).narrow(1, self.factor - phase.first, x.shape[1])
            last = upsampled[:, -1].clone()
        else:
            assert slots is not None
            rows = torch.arange(len(x), device=x.device)
            spread, last = upsampled[rows[:, None], slots.of_token], upsampled[rows, slots.of_token[:, -1]]
        return x + self._after_first_block(spread, stretch), HourglassState(tail, last), after

    def _after_first_block(self, upsampled: Tensor, stretch: Stretch) -> Tensor:
        """Zero the outputs for tokens before the first full block of their document: they are of another document."""
        return torch.where((stretch.in_document >= self.factor - 1)[..., None], upsampled, 0)

    def _downsample(self, seen: Tensor, stretch: Stretch, phase: BlockPhase) -> tuple[Tensor, Stretch, Slots | None]:
        """Return a vector for each block, its position, and the slots of the blocks unless they end evenly."""
        factor, slots = self.factor, None
        if phase.even:  # seen[:, t : t + F] is the block that ends at token t
            blocks = seen.narrow(1, phase.first, phase.blocks * factor).unflatten(1, (-1, factor))
            index = stretch.in_document[:, phase.first :: factor]
        else:
            slots = self.slots(stretch.in_document, phase.blocks)
            rows = torch.arange(len(seen), device=seen.device)[:, None]
            blocks = seen[rows[:, None], slots.ends[..., None] + torch.arange(factor, device=seen.device)]
            index = stretch.in_document.gather(1, slots.ends)
        index = index // factor
        return self.pool(blocks), Stretch(index, index == 0 if phase.fresh else None), slots

    def slots(self, index: Tensor, blocks: int) -> Slots:
        """Return the slots of the blocks of each row, given the positions (B, T) of its tokens."""
        full = index % self.factor == self.factor - 1
        ended = full.cumsum(1)
        if self.policy_for(index).reads_values:
            ends = full.int().argsort(dim=1, descending=True, stable=True)[:, :blocks]
            return Slots(ends, full.gather(1, ends), ended)
        begun = (full & (index < self.factor)).cumsum(1) > 0
        of_token = ended + begun * (blocks - ended[:, -1:])
        slot = torch.where(full, of_token - 1, blocks)  # tokens that end no block go to a slot that is dropped
        time = torch.arange(index.shape[1], device=index.device).expand_as(index)
        ends, valid = (x.new_zeros(len(x), blocks + 1).scatter(1, slot, x)[:, :blocks] for x in (time, full))
        return Slots(ends, valid, of_token)

    def _run_middle(
        self,
        pooled: Tensor,
        states: BlockStates,
        stretch: Stretch,
        slots: Slots | None,
        middle: Sequence[Block],
        call_for: CallFor,
    ) -> tuple[Tensor, BlockStates]:
        """Return the outputs of the middle layers for all slots, and their states after the last block of each row."""
        if slots is not None and self.policy_for(pooled).reads_values:
            y, after = run_blocks(middle, pooled, states, stretch, call_for)
            return y, _states_after(slots.of_token[:, -1], pooled, states, after, stretch, middle, call_for)
        if slots is None or not slots.of_token.shape[1] % self.factor:
            return run_blocks(middle, pooled, states, stretch, call_for)
        # the last slot of a row may have no block
        outputs, last = [], pooled.shape[1] - 1
        for begin, end in ((0, last), (last, last + 1)) if last else ((0, 1),):
            before = states
            part = stretch.select(slice(None), slice(begin, end))
            y, states = run_blocks(middle, pooled[:, begin:end], before, part, call_for)
            outputs.append(y)
        return torch.cat(outputs, dim=1), where_state(slots.valid[:, -1], states, before)


def _states_after(
    counts: Tensor,
    pooled: Tensor,
    before: BlockStates,
    after: BlockStates,
    stretch: Stretch,
    middle: Sequence[Block],
    call_for: CallFor,
) -> BlockStates:
    """Return the middle layers' states after the blocks of each row, `counts` (B,). Rows with all or no blocks take
    them from `after` or `before`; other rows are recomputed."""
    blocks = pooled.shape[1]
    if blocks == 1:
        return where_state(counts == 1, after, before)
    states = []
    for row, count in enumerate(counts.tolist()):
        state = state_row(after if count == blocks else before, row)
        if 0 < count < blocks:
            of_row = stretch.select(slice(row, row + 1), slice(count))
            _, state = run_blocks(middle, pooled[row : row + 1, :count], state, of_row, call_for)
        states.append(state)
    return concat_states(states)


class EncoderHourglass(BlockPooling):
    """Downsampling of a sequence for the middle layers of an encoder, and upsampling of their outputs."""

    def downsample(self, x: Tensor, padding: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return a vector for each block (B, N, width) of x (B, T, width), and the padding (B, N)."""
        missing = -x.shape[1] % self.factor
        blocks = pad(x, (0, 0, 0, missing)).unflatten(1, (-1, self.factor))
        if padding is None and not missing:
            return self.pool(blocks), None
        tokens = x.new_ones(1, x.shape[1], dtype=torch.bool) if padding is None else ~padding
        mask = pad(tokens, (0, missing)).unflatten(1, (-1, self.factor))  # (B or 1, N, F)
        return self.pool(blocks, mask), None if padding is None else ~mask.any(2)

    def upsample(self, x: Tensor, y: Tensor) -> Tensor:
        """Return x (B, T, width) plus the middle layers' outputs y (B, N, width)."""
        return x + self.project(y).to(x.dtype).repeat_interleave(self.factor, 1)[:, : x.shape[1]]


def hourglass_reference(
    x: Tensor, begins: Sequence[int], factor: int, pool: Callable[[Tensor], Tensor], inner: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return the hourglass of one row x (T, width) with documents that begin at `begins`, by definition. `pool` maps a
    block to a vector; `inner` maps the vectors of a document to the vectors added to its tokens. Slow; used as the
    reference in tests."""
    parts = []
    for begin, end in zip(begins, [*begins[1:], len(x)], strict=True):
        blocks = [x[at : at + factor] for at in range(begin, end - factor + 1, factor)]
        upsampled = inner(torch.stack([pool(block) for block in blocks])) if blocks else None
        for token in range(begin, end):
            full = (token + 1 - begin) // factor  # blocks of the document up to this token
            parts.append(x[token] + upsampled[full - 1] if full and upsampled is not None else x[token])
    return torch.stack(parts)


def encoder_hourglass_reference(
    x: Tensor, factor: int, pool: Callable[[Tensor], Tensor], inner: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return the encoder's hourglass of one row x (T, width), by definition. `pool` maps a block to a vector; the last
    block may have fewer tokens. Slow; used as the reference in tests."""
    upsampled = inner(torch.stack([pool(block) for block in x.split(factor)]))
    return torch.stack([token + upsampled[index // factor] for index, token in enumerate(x)])
