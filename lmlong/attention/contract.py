"""What every causal attention must be: two functions, from which all else derives.

B batch, H heads, T time, K key width, V value width.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

State = TypeVar("State", bound=NamedTuple)


class CausalAttention(nn.Module, ABC, Generic[State]):
    """Attention to the past only, whose whole memory is a state that goes in and comes out.

    q, k: (B, H, T, K); v: (B, H, T, V). `starts` (B, T) marks the first token of a document: there the state is
    forgotten. `log_decay` (B, H, T), at most 0, is given exactly to those attentions that say they are `gated`.
    """

    heads: int
    width: int
    """Of one head, in keys and values alike."""

    gated = False
    """Whether the block must supply a `log_decay` learned from each token."""

    turned_by_position = False
    """Whether queries and keys are turned by their place first, unless the recipe says otherwise: whatever knows no
    other order needs it."""

    largest_scale = 1e4
    """Largest deviation of q and k up to which outputs and gradients stay as exact as the number format allows."""

    @abstractmethod
    def init_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> State:
        """The memory of having read nothing; `dtype` is that of the keys and values to come."""

    @abstractmethod
    def prefill(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: State,
        starts: Tensor | None = None,
        log_decay: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """Continue from `state` over any number of tokens: outputs (B, H, T, V) and the state after them."""

    def forward(self, *inputs: Any) -> tuple[Tensor, State]:
        """`prefill`, by the name under which torch lets others act before and after a module's work."""
        return self.prefill(*inputs)

    def step(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: State,
        starts: Tensor | None = None,
        log_decay: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """Continue over one token (T = 1)."""
        return self.prefill(q, k, v, state, starts, log_decay)

    @abstractmethod
    def reference(
        self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None = None, log_decay: Tensor | None = None
    ) -> Tensor:
        """The definition, written from its formula with a full matrix of weights: what `prefill` of all must equal."""

    @abstractmethod
    def state_numbers(self, tokens: int) -> int:
        """How many numbers one row of the state holds after so many tokens."""


def tensors(state: Any) -> Iterator[Tensor]:
    """Every tensor in a state, however its tuples are nested."""
    if isinstance(state, Tensor):
        yield state
    elif state is not None:
        for part in state:
            yield from tensors(part)


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """The type sums are kept in: float32, or float64 when the inputs are."""
    return torch.promote_types(dtype, torch.float32)
