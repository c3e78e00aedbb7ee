"""A group of processes that read neighbouring parts of the same rows, each in its own memory.

Only states pass from part to part. In each layer, a process computes what its part does to any state before it (the
effect, `CausalAttention.effect`) and gathers the effects of all parts. It applies those of the parts before its own to
the state before the rows, and reads its part from there. So the bytes that are sent depend on the size of the state,
not on the length of the rows.

Token ids are small: each process has all of them, so positions and last tokens need no exchange.

P processes of a group, B batch, T time.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, distributed
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from lmlong.attention.base import CausalAttention, state_tensors
from lmlong.attention.inputs import Inputs
from lmlong.attention.scan import without_autocast
from lmlong.attention.tail import after_tail, tail_of
from lmlong.model.state import map_state, rebuild_state

State = TypeVar("State")


def part_of(tokens: int, rank: int, size: int) -> slice:
    """Return which of the tokens of a row one of `size` processes reads."""
    return slice(tokens * rank // size, tokens * (rank + 1) // size)


def longest_part(tokens: int, size: int) -> int:
    """Return the tokens of the longest part of a row that `size` processes read."""
    return -(-tokens // size)


# other names since torch 2.13, where the old ones give a warning
all_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
reduce_scatter = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor


class SequenceGroup:
    """The group of this process, among all processes of a run in groups of `size` neighbouring ranks. All create theirs
    together, and all of a group call the same methods in the same order."""

    def __init__(self, rank: int, ranks: int, size: int):
        self.rank, self.size = rank % size, size  # the part of the rows that this process reads
        for first in range(0, ranks, size):
            group = distributed.new_group(list(range(first, first + size)))  # all processes take part in this
            if first <= rank < first + size:
                self.group, self.first = group, first

    def gather(self, x: Tensor) -> Tensor:
        """Return the tensors x of all processes, which have the same shape, stacked (P, ...)."""
        every = x.new_empty(self.size * x.numel())
        all_gather(every, x.contiguous().view(-1), self.group)
        return every.view(self.size, *x.shape)

    def sum_of_own(self, x: Tensor) -> Tensor:
        """Return the sum of x[rank], for the rank of this process, over the tensors x (P, ...) of all processes."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32)).contiguous()
        own = wide.new_empty(wide[0].numel())
        reduce_scatter(own, wide.view(-1), group=self.group)
        return own.view(x.shape[1:]).to(x.dtype)

    def from_last(self, x: Tensor) -> Tensor:
        """Return the tensor x of the last process."""
        x = x.contiguous()
        distributed.broadcast(x, self.first + self.size - 1, self.group)
        return x

    def state_after(self, state: State) -> State:
        """Return the state after the rows, given that after the part of each process."""
        tensors = list(state_tensors(state))
        return rebuild_state(state, iter(_from_bytes(self.from_last(_as_bytes(tensors)), tensors)))

    def gather_effects(self, effect: Any) -> list[Any]:
        """Return the effects of all parts, which are sent together as bytes."""
        tensors = list(state_tensors(effect))
        every = self.gather(_as_bytes(tensors))
        return [rebuild_state(effect, iter(_from_bytes(one, tensors))) for one in every]


class SequencePart(NamedTuple):
    """The part of some rows that a process reads."""

    group: SequenceGroup
    time: int  # tokens of each row

    @property
    def own(self) -> slice:
        """The tokens of this part."""
        return part_of(self.time, self.group.rank, self.group.size)

    def attention_state(
        self,
        attention: CausalAttention[Any],
        state: State,
        k: Tensor,
        v: Tensor,
        document_starts: Tensor | None,
        inputs: Inputs,
    ) -> tuple[State, Tensor]:
        """Return an attention's state before this part, given that before the rows, and the inputs of this part; and
        the values v, to be used instead."""
        longest = longest_part(self.time, self.group.size)
        with without_autocast(k):
            effect = attention.padded_effect(attention.effect(k, v, document_starts, inputs), longest)
            return self._before(state, effect, attention.after_effect, v)

    def tail(self, tail: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the last inputs (B, L, C) of a convolution before this part, given those before the rows, and the
        inputs x (B, T, C) of this part; and x, to be used instead."""
        return self._before(tail, tail_of(x, tail.shape[1]), after_tail, x)

    def _before(
        self, state: State, effect: Any, after: Callable[[State, Any], State], x: Tensor
    ) -> tuple[State, Tensor]:
        """Return the state before this part, given that before the rows and the effect of this part; and x."""
        structure = map_state(lambda part: part.new_empty(0), effect)  # without the data
        x, *before = _Before.apply(self.group, after, state, structure, x, *state_tensors(effect))
        return rebuild_state(state, iter(before)), x


class _Before(torch.autograd.Function):
    """The state before a part, with gradients for its effect alone: the state before the rows is passed on without.

    x passes through, so that all processes run the backward pass, even one whose results do not depend on the state.
    """

    @staticmethod
    def forward(
        ctx: Any,
        group: SequenceGroup,
        after: Callable[[Any, Any], Any],
        state: Any,
        effect: Any,
        x: Tensor,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        effects = group.gather_effects(rebuild_state(effect, iter(tensors)))
        before = _applied(after, state, effects[: group.rank])
        ctx.group, ctx.after, ctx.state, ctx.effect = group, after, state, effect
        ctx.save_for_backward(*chain(*map(state_tensors, effects)))
        results = tuple(part.clone() for part in state_tensors(before))
        ctx.mark_non_differentiable(*(part for part in results if not part.is_floating_point()))
        return x.view_as(x), *results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor, *grads: Tensor) -> tuple[Tensor | None, ...]:
        group, saved = ctx.group, iter(ctx.saved_tensors)
        leaves = (x.detach().requires_grad_(x.is_floating_point()) for x in saved)
        effects = [rebuild_state(ctx.effect, leaves) for _ in range(group.size)]
        with torch.enable_grad(), without_autocast(dx):
            before = _applied(ctx.after, ctx.state, effects[: group.rank])
        ends = [(part, grad) for part, grad in zip(state_tensors(before), grads, strict=True) if part.requires_grad]
        inputs = [[part for part in state_tensors(effect) if part.requires_grad] for effect in effects]
        earlier = list(chain(*inputs[: group.rank]))
        found: Iterator[Tensor] = iter(())
        if earlier:
            outputs, doutputs = zip(*ends, strict=True)
            found = iter(torch.autograd.grad(outputs, earlier, doutputs, materialize_grads=True))
        dinputs = [
            [next(found) if number < group.rank else torch.zeros_like(part) for part in parts]
            for number, parts in enumerate(inputs)
        ]
        sums = iter([group.sum_of_own(torch.stack(parts)) for parts in zip(*dinputs, strict=True)])
        deffect = [next(sums) if part.requires_grad else None for part in state_tensors(effects[0])]
        return None, None, None, None, dx, *deffect


def _applied(after: Callable[[Any, Any], Any], state: Any, effects: Sequence[Any]) -> Any:
    """Return the state after some parts."""
    for effect in effects:
        state = after(state, effect)
    return state


def _as_bytes(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors as one tensor of bytes, those of large numbers first, so that each begins at a multiple of its
    numbers' size, and so does the next after it."""
    ordered = sorted(tensors, key=lambda x: -x.element_size())
    data = torch.cat([x.detach().contiguous().view(-1).view(torch.uint8) for x in ordered])
    return pad(data, (0, -len(data) % 8))


def _from_bytes(data: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors that `_as_bytes` has packed into `data`. They have the shapes and dtypes of `like`."""
    order = sorted(range(len(like)), key=lambda n: -like[n].element_size())
    sizes = [like[n].nbytes for n in order]
    parts = data[: sum(sizes)].split(sizes)
    tensors = {n: part.view(like[n].dtype).view(like[n].shape) for n, part in zip(order, parts, strict=True)}
    return [tensors[n] for n in range(len(like))]
