"""The interface of causal attention: a state that goes in and comes out, and a reference formula.

B batch, H heads, T time, K key dim, V value dim.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from lmlong.attention.inputs import NOTHING, Input, Inputs
from lmlong.attention.state_check import check_alike
from lmlong.native.decode.kind import DecodeKind
from lmlong.native.state import state_tensors

State = TypeVar("State", bound=NamedTuple)


class CausalAttention(nn.Module, ABC, Generic[State]):
    """Attention to the past alone, whose whole memory is its state.

    q, k: (B, H, T, K); v: (B, H, T, V). `document_starts` (B, T) marks the first token of a document: there the state
    is reset. Where the attention declares `inputs`, the model hands it a tensor for each.
    """

    heads: int
    head_dim: int
    """K, the size of a head's queries and keys."""
    value_dim: int
    """V, the size of a head's values."""
    queries_per_key = 1
    """Neighbouring heads of queries that have a head of keys and values in common (`group_heads`)."""
    has_keys = True
    """Whether it has queries and keys; without, they are of width 0."""

    normalizes_heads = True
    """Whether the model normalizes the output of each head, as fits a mean of values."""

    starts_with_recall = False
    """Whether its queries begin as codes of the last few tokens, and its keys as the same codes one token late: what
    followed the same tokens before is then found before anything is learned."""

    inputs: Mapping[str, Input] = MappingProxyType({})
    """What the model must supply for each token besides q, k and v."""

    uses_rope = False
    """Whether RoPE is applied to queries and keys, unless the recipe says otherwise: an attention with no other notion
    of order needs it."""

    kernels: Mapping[str, type[Any]] = MappingProxyType({})
    """What computes many tokens, by its name in recipes: `torch`, `native` code, `triton`; none where torch's own
    functions do."""

    compiled = False
    """Whether torch.compile runs the model; kernels that it cannot trace then run beside what it compiles."""

    state_growth: Literal["constant", "per token"] = "constant"
    """Whether the size of the state grows with the tokens read."""

    native_decode: DecodeKind[Any] | None = None
    """How native code decodes it; None where torch does."""

    largest_scale = 1e4
    """Largest standard deviation of q and k up to which outputs and gradients are as exact as the number format."""

    @abstractmethod
    def init_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> State:
        """Return the state before the first token; `dtype` is that of the keys and values to come."""

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
        """Return outputs (B, H, T, V) and the state after any number of tokens, from one to a whole prompt."""

    @abstractmethod
    def reference(
        self, q: Tensor, k: Tensor, v: Tensor, document_starts: Tensor | None = None, inputs: Inputs = NOTHING
    ) -> Tensor:
        """Return the outputs by the formula, a T x T matrix of weights or the token loop; `forward` must equal it."""

    def use_kernel(self, name: str) -> None:
        """Compute many tokens by a kernel, or by torch where there is none of that name."""
        if self.kernels:
            self.kernel = self.kernels[name if name in self.kernels else "torch"]()

    @property
    def kernel_name(self) -> str:
        """The name of the kernel that computes many tokens; it leaves devices and dtypes that it lacks to torch."""
        return self.kernel.name if self.kernels else "torch"

    def untraced(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function, beside what torch.compile runs where it does."""
        if not self.compiled:
            return function(*arguments)
        from lmlong.attention.untraced import untraced

        return untraced(function, *arguments)

    def group_heads(self, kv_heads: int) -> bool:
        """Take so few heads of keys and values, each for as many neighbouring heads of queries, and return whether it
        can; else the model repeats them."""
        return kv_heads == self.heads

    @property
    def parts(self) -> Sequence["CausalAttention[Any]"]:
        """The attentions that it is made of: itself, unless it puts others together."""
        return (self,)

    @property
    def kv_heads(self) -> int:
        """Heads of the keys and values that it takes."""
        return self.heads // self.queries_per_key

    def settle(self, state: State) -> State:
        """Return the state as a prefill leaves it, where steps keep it in another form."""
        return state

    def check_state(self, state: State, empty: State) -> None:
        """Raise StateError unless `state`, which was read from a file, can be one of this attention; `empty` is the
        state before the first token."""
        check_alike(state, empty, grows=self.state_growth == "per token")

    def state_numbers(self, tokens: int) -> int:
        """Return how many numbers the state of one row holds after `tokens` tokens: those before the first token, and
        if it grows, `tokens` of each tensor that begins without any."""
        empty, grows = self.init_state(1, torch.device("meta"), torch.float32), self.state_growth == "per token"
        return sum(prod(tokens if grows and size == 0 else size for size in x.shape) for x in state_tensors(empty))


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums: float32, or float64 where the inputs are."""
    return torch.promote_types(dtype, torch.float32)
