"""Chunks of a span, and the decay within and between them, shared by all recurrences.

The chunked scans of the recurrences themselves are linear/chunk.py and delta/chunk.py.

N chunks, B batch, H heads, C tokens in a chunk, T time.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from lmlong.attention.compiling import compiled
from lmlong.attention.device_policy import CPU_POLICY, DevicePolicy
from lmlong.attention.feature_maps import FeatureMap
from lmlong.attention.scan import Kernel, Span

T = TypeVar("T")

CHUNK_SIZE = 64
"""Tokens in a chunk. Within a chunk attention is a masked product; the state carries it from chunk to chunk."""

MIN_LOG2_DECAY = -100.0
"""Lower bound of exponents of 2: negligible beside a token's own weight, but not a slow denormal number."""


class Decay(NamedTuple):
    """The decay masks of all chunks, (N, B or 1, H or 1, ...); None if nothing decays and no document starts.

    With a decay for each channel, the mask only separates documents."""

    mask: Tensor | None  # W (..., C, C)
    from_state: Tensor | None  # a (..., C, 1), multiplies the queries' outputs from the state
    to_end: Tensor | None  # u (..., C, 1), multiplies the contributions of keys to the state
    chunk: Tensor | None  # r (..., 1, 1), multiplies the state, in its dtype
    pairs: Sequence[Tensor] | None = None
    """Set with a decay for each channel; a, u and r then have a value for each channel (linear/channel_decay.py)."""


class ChunkedKernel(Kernel):
    """A kernel that reads features in chunks (N B, H, C, F); the last chunk may be padded."""

    name = "torch"
    token_dim = 0

    def __init__(self, policy: DevicePolicy = CPU_POLICY):
        self.policy = policy

    def suited(self, features: FeatureMap, x: Span, state: Tensor, policy: DevicePolicy) -> Kernel:
        return type(self)(policy)

    def fused(self, function: Callable[..., T]) -> Callable[..., T]:
        """Return a function, or its compiled form if torch.compile runs the model."""
        return compiled(function) if self.policy.compiles else function

    def arrange(self, x: Tensor) -> Tensor:
        return to_chunks(x).flatten(0, 1)

    def restore(self, arranged: Tensor, out: Tensor) -> None:
        from_chunks(arranged.unflatten(0, (-1, len(out))), out)


def decay_masks(x: Span, dtype: torch.dtype, state_dtype: torch.dtype, policy: DevicePolicy) -> Decay:
    """Return the decay masks of a span, from its document starts and log decays (B, H, T)."""
    document_starts, log_decay = x.document_starts, x.log_decay
    mask = from_state = None
    if log_decay is not None:
        # exp2 is three times as fast as exp in torch
        total = to_chunks(log_decay.to(state_dtype) / math.log(2)).cumsum(-1)
        # clamped before exp2: differences to the future are positive and could overflow
        mask = (total[..., :, None] - total[..., None, :]).clamp_(MIN_LOG2_DECAY, 0).exp2_()
        from_state = total.clamp_(min=MIN_LOG2_DECAY).exp2_()
    if document_starts is not None and not (policy.reads_values and not document_starts.any()):
        starts = to_chunks(document_starts[:, None].to(state_dtype))
        before = starts.sum(-1, keepdim=True).cumsum(0) - starts.sum(-1, keepdim=True)
        document = before + starts.cumsum(-1)  # documents that started in this span up to each token
        same = (document[..., :, None] == document[..., None, :]).to(state_dtype)
        carried = (document == before).to(state_dtype)
        mask = same if mask is None else mask.mul_(same)
        from_state = carried if from_state is None else from_state.mul_(carried)
    if mask is None or from_state is None:
        return Decay(None, None, None, None)
    to_end, chunk = mask[..., -1, :, None], from_state[..., -1:, None]
    return Decay(mask.to(dtype).tril_(), from_state[..., None].to(dtype), to_end.to(dtype), chunk)


def masked(weights: Tensor, decay: Decay) -> Tensor:
    return weights.tril_() if decay.mask is None else weights.mul_(decay.mask)


def scaled(x: Tensor, by: Tensor | None) -> Tensor:
    return x if by is None else x * by


def to_chunks(x: Tensor) -> Tensor:
    """Return (B, H, T, ...) as (N, B, H, C, ...), contiguous, padded with zeros."""
    size = min(CHUNK_SIZE, 1 << (x.shape[2] - 1).bit_length())  # a power of 2, which can be halved
    missing = -x.shape[2] % size
    if missing:
        x = pad(x, (*(0, 0) * (x.ndim - 3), 0, missing))
    return x.unflatten(2, (-1, size)).movedim(2, 0).contiguous()


def from_chunks(x: Tensor, out: Tensor) -> None:
    """Write (N, B, H, C, ...) to (B, H, T, ...)."""
    size = x.shape[3]
    whole, rest = divmod(out.shape[2], size)
    out[:, :, : whole * size].unflatten(2, (whole, size)).copy_(x[:whole].movedim(0, 2))
    if rest:
        out[:, :, whole * size :] = x[whole, :, :, :rest]


def accumulate(states: Tensor, transitions: Tensor | None, policy: DevicePolicy, backwards: bool = False) -> Tensor:
    """Add to each of the states (N + 1, B, H, F, V), in place, the sum in the state before it times a transition.

    `transitions` (N, B, H, ...) are numbers or columns (F, 1) that multiply states, or None if states are only summed.
    With `backwards`, the sum in the state after it.
    """
    if policy.span_bytes is not None:
        return accumulate_in_tree(states, None if transitions is None else transitions.clone(), backwards)
    each = states.unbind()
    steps = range(len(each) - 1)
    for n in reversed(steps) if backwards else steps:
        into, source = (each[n], each[n + 1]) if backwards else (each[n + 1], each[n])
        into.add_(source if transitions is None else source * transitions[n])
    return states


def accumulate_in_tree(states: Tensor, transitions: Tensor | None, backwards: bool = False) -> Tensor:
    """Do the same as `accumulate` in 2 log2(N) steps, each for all blocks of `size` states at once. Transitions may
    also be matrices (F, F). They are overwritten.

    Up the tree, the last state of each pair of blocks becomes the sum over the pair. Down the tree, the last state of
    the first block of each pair becomes the sum over everything up to it.
    """
    sizes = [1 << level for level in range(len(states).bit_length() - 1)]
    for first, size in [*((2 * size - 1, size) for size in sizes), *((3 * size - 1, size) for size in sizes[::-1])]:
        count = len(range(first, len(states), 2 * size))
        if count == 0:
            continue
        into, source = (_each(states, begin, 2 * size, count, backwards) for begin in (first, first - size))
        if transitions is None:
            into.add_(source)
            continue
        is_matrix = transitions.shape[-1] > 1
        over_block = _each(transitions, first - 1, 2 * size, count, backwards)
        if is_matrix:
            into.add_(over_block @ source)
        else:
            into.addcmul_(over_block, source)
        if first < 2 * size and count > 1:  # transitions over pairs; nothing comes before the first pair
            into, source = (
                _each(transitions, begin, 2 * size, count - 1, backwards) for begin in (4 * size - 2, 3 * size - 2)
            )
            if is_matrix:
                into.copy_(into @ source)
            else:
                into.mul_(source)
    return states


def _each(x: Tensor, first: int, step: int, count: int, backwards: bool) -> Tensor:
    """Return `count` elements of x from `first`, `step` apart; counted from the end if `backwards`."""
    length = step * (count - 1) + 1
    begin = len(x) - first - length if backwards else first
    return x[begin : begin + length : step]


def add_matmul(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Add a product to `total` (N, B, H, ...)."""
    total.flatten(0, 2).baddbmm_(left.flatten(0, 2), right.flatten(0, 2))
    return total
