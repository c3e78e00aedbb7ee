"""The interface of causal attention: a state that goes in and comes out, and a reference formula.

B batch, H heads, T time, K key dim, V value dim.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from types import MappingProxyType
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from lmlong import recipe
from lmlong.attention.device_policy import FollowsPolicy
from lmlong.attention.inputs import NOTHING, Input, Inputs
from lmlong.attention.state_check import check_alike
from lmlong.errors import UsageError
from lmlong.native.decode.kind import DecodeKind
from lmlong.native.state import state_tensors

State = TypeVar("State", bound=NamedTuple)


class CausalAttention(FollowsPolicy, ABC, Generic[State]):
    """Causal attention whose whole memory is its state.

    q, k: (B, H, T, K); v: (B, H, T, V). `document_starts` (B, T) marks the first token of each document, at which the
    state is reset. The model passes one tensor for each of the declared `inputs`.
    """

    heads: int
    head_dim: int
    """K, the size of a head's queries and keys."""
    value_dim: int
    """V, the size of a head's values."""
    shares_keys = False
    """Whether neighbouring query heads can share a key/value head."""
    queries_per_key = 1
    """Number of neighbouring query heads that do (`group_heads`)."""
    has_keys = True
    """Whether it has queries and keys. If False, their width is 0."""

    reads_alone = False
    """Whether it has `outputs`: a cheaper way to read a text that begins here, if the state after is not wanted."""

    normalizes_heads = True
    """Whether the model normalizes the output of each head, which suits a mean of values."""

    starts_with_recall = False
    """Whether queries are initialized as codes of the last few tokens, and keys as the same codes one token later. An
    untrained model then already recalls what followed an earlier occurrence of those tokens."""

    inputs: Mapping[str, Input] = MappingProxyType({})
    """The inputs besides q, k and v that the model supplies for each token."""

    uses_rope = False
    """Whether RoPE is applied to queries and keys unless the recipe sets it. An attention that does not otherwise
    depend on order needs it. Recipes ask the class of a plug-in, and the entry of a built-in kind."""

    kernels: Mapping[str, type[Any]] = MappingProxyType({})
    """The kernels for many tokens, by their names in recipes: `torch`, `native`, `triton`, `fla`. Each has a class
    method `unavailable_reason(attention, device)`. Empty if the attention uses torch's own functions."""

    is_compiled = False
    """Whether torch.compile runs the model. Kernels that it cannot trace then run outside the compiled graph."""

    state_growth: Literal["constant", "per token"] = "constant"
    """Whether the size of the state grows with the tokens read."""

    native_decode: DecodeKind[Any] | None = None
    """How native code decodes it; None if torch decodes it."""

    state_dtype = torch.float32
    """The lowest precision of the sums in a state. Without a gate, a float32 sum of ones stops growing at 2^24."""

    cache_dtype: torch.dtype | None = None
    """The dtype in which a new state caches keys and values, if the attention caches any; None for their own. Whatever
    a state caches, every token attends to it as it is cached."""

    largest_scale = 1e4
    """Largest standard deviation of q and k for which outputs and gradients are as exact as the number format."""

    @classmethod
    def from_options(
        cls, heads: int, head_dim: int, value_dim: int, options: recipe.Attention
    ) -> "CausalAttention[Any]":
        """Return the attention that the options of a recipe describe."""
        return cls(heads, head_dim, value_dim)  # type: ignore[call-arg]

    @abstractmethod
    def init_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> State:
        """Return the state before the first token; `dtype` is the dtype of the keys and values."""

    @abstractmethod
    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: State,
        document_starts: Tensor | None = None,
        inputs: Inputs = NOTHING,
    ) -> tuple[Tensor, State]:
        """Return outputs (B, H, T, V) and the state after T tokens, from one token to a whole prompt."""

    def outputs(
        self, q: Tensor, k: Tensor, v: Tensor, document_starts: Tensor | None = None, inputs: Inputs = NOTHING
    ) -> Tensor:
        """Return the outputs of a text that begins here, whose state after is not wanted."""
        raise AssertionError(f"{type(self).__name__} reads a text by `forward`")

    @abstractmethod
    def reference(
        self, q: Tensor, k: Tensor, v: Tensor, document_starts: Tensor | None = None, inputs: Inputs = NOTHING
    ) -> Tensor:
        """Return the outputs by the definition, a T x T matrix of weights or a token loop; `forward` must equal it."""

    def effect(self, k: Tensor, v: Tensor, document_starts: Tensor | None = None, inputs: Inputs = NOTHING) -> Any:
        """Return what some tokens do to any state before them, a NamedTuple of tensors of a size that depends neither
        on that state nor, if the state is of constant size, on the number of tokens.

        `after_effect` of it is the state that `forward` returns. With it, the parts of a text can be computed at once
        by several processes (model/sequence_group.py). An attention may leave both out.
        """
        raise self._has_no_effect()

    def after_effect(self, state: State, effect: Any) -> State:
        """Return the state after some tokens, given the state before them and their effect."""
        raise self._has_no_effect()

    def _has_no_effect(self) -> UsageError:
        return UsageError(f"{type(self).__name__} defines no effect, so it cannot compute the parts of a text at once.")

    def padded_effect(self, effect: Any, tokens: int) -> Any:
        """Return an effect in the shape of that of `tokens` tokens, no fewer. Only a state that grows needs it."""
        return effect

    @property
    def divides(self) -> bool:
        """Whether several processes can compute the parts of one text: whether it has an `effect`."""
        return type(self).effect is not CausalAttention.effect

    def denominators(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: State,
        document_starts: Tensor | None = None,
        inputs: Inputs = NOTHING,
    ) -> Tensor:
        """Return the denominators (B, H, T) of the outputs: sums of weights, which must not be close to 0.

        An attention may leave it out. One that has it keeps S (B, H, F, V) and z (B, H, F) in its state, the sums of
        numerators and denominators.
        """
        raise UsageError(f"{type(self).__name__} defines no denominators, so law 10 does not apply to it.")

    @property
    def has_denominators(self) -> bool:
        """Whether it has `denominators`, and law 10 applies."""
        return type(self).denominators is not CausalAttention.denominators

    def use_kernel(self, name: str) -> None:
        """Compute many tokens with the named kernel, or with torch if the attention has no kernel of that name."""
        if self.kernels:
            self.kernel = self.kernels[name if name in self.kernels else "torch"]()

    @property
    def kernel_name(self) -> str:
        """The name of the selected kernel, which leaves devices and dtypes that it does not support to torch."""
        return self.kernel.name if self.kernels else "torch"

    def kernel_reasons(self, device: torch.device) -> dict[str, str | None]:
        """Return why each kernel cannot compute this attention on a device; None if it can."""
        return {name: kernel.unavailable_reason(self, device) for name, kernel in self.kernels.items()}

    def apart(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function, or if torch.compile runs the model, one that calls it outside the graph."""
        if not self.is_compiled:
            return function
        from lmlong.attention.untraced import untraced

        return partial(untraced, function)

    def group_heads(self, kv_heads: int) -> bool:
        """Try to share each of `kv_heads` key/value heads among neighbouring query heads. Return False if the attention
        cannot; the model then repeats keys and values."""
        if self.shares_keys:
            self.queries_per_key = self.heads // kv_heads
        return kv_heads == self.kv_heads

    def ungrouped(self, *keys_or_values: Tensor) -> tuple[Tensor, ...]:
        """Return keys or values repeated for each query head."""
        if self.queries_per_key == 1:
            return keys_or_values
        return tuple(x.repeat_interleave(self.queries_per_key, dim=1) for x in keys_or_values)

    @property
    def parts(self) -> Sequence["CausalAttention[Any]"]:
        """The attentions it consists of: itself, unless it combines several. Its state is then the tuple of theirs."""
        return (self,)

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads that `forward` takes."""
        return self.heads // self.queries_per_key

    def settle(self, state: State) -> State:
        """Return the state in the form that a prefill returns, if decode steps keep it in another form."""
        return state

    def owned(self, state: State) -> State:
        """Return the state in the form of a decode engine that owns its tensors: a step writes to large ones in place,
        where the usual step would copy them."""
        return state

    def check_state(self, state: State, empty: State) -> None:
        """Raise StateError unless `state`, read from a file, is a valid state of this attention. `empty` is the state
        before the first token."""
        check_alike(state, empty, grows=self.state_growth == "per token")

    def state_numbers(self, tokens: int) -> int:
        """Return how many numbers the state of one row holds after `tokens` tokens. In a state that grows, dimensions
        of size 0 before the first token have size `tokens`."""
        empty, grows = self.init_state(1, torch.device("meta"), torch.float32), self.state_growth == "per token"
        return sum(prod(tokens if grows and size == 0 else size for size in x.shape) for x in state_tensors(empty))


def causal_mask(time: int, device: torch.device, document_starts: Tensor | None = None) -> Tensor:
    """Return (T, T), or (B, 1, T, T) with document starts (B, T): true if the first token attends to the second, which
    is not later and in the same document."""
    mask = torch.ones(time, time, dtype=torch.bool, device=device).tril()
    if document_starts is None:
        return mask
    document = document_starts.cumsum(1)[:, None]
    return mask & (document[..., :, None] == document[..., None, :])


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums: float32, or float64 for float64 inputs."""
    return torch.promote_types(dtype, torch.float32)
