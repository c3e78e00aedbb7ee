"""The base class of recurrences over queries and keys: a feature map, an optional forget gate, and the scan.

B batch, H heads, T time, F features, V value dim.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lmlong.attention.base import CausalAttention, State, at_least_float32
from lmlong.attention.feature_maps import FeatureMap
from lmlong.attention.inputs import NOTHING, Gate, Inputs
from lmlong.attention.scan import Kernel, Scan, ScanInputs, without_autocast
from lmlong.errors import UsageError

LONGEST_MEMORY = 8192

GATE_RANK = 16
"""Rank of the projection to a gate for each feature: a full matrix would be as large as the query projection."""


def memory_lengths(heads: int, longest: int = LONGEST_MEMORY) -> Tensor:
    """Return the number of tokens (H,) after which 1/e of a head's state is left: from 2 to `longest`, evenly on a log
    scale.

    Always on the CPU: on the meta device, `logspace` makes torch load its compiler, which takes a second."""
    if heads == 1:
        return torch.tensor([1024.0], device="cpu")
    return torch.logspace(1, math.log2(longest), heads, base=2.0, device="cpu")


class Recurrence(CausalAttention[State]):
    """Attention with a state of fixed size, which each token updates and a gate may decay."""

    kernels: Mapping[str, type[Kernel]]
    kernel: Kernel
    log_decay: Tensor | None
    takes_channel_decay = False
    """Whether the recurrence supports a decay for each feature."""

    def __init__(
        self,
        heads: int,
        head_dim: int,
        value_dim: int,
        feature_map: FeatureMap,
        decay: str = "none",
        longest_memory: int = LONGEST_MEMORY,
    ):
        super().__init__()
        self.heads, self.head_dim, self.value_dim = heads, head_dim, value_dim
        self.feature_map = self.features_of(feature_map)
        self.largest_scale = feature_map.largest_scale
        self.inputs = self.own_gates()
        self.by_channel = decay == "channel"
        """Whether each feature has its own decay."""
        if self.by_channel and (feature_map.signed or not self.takes_channel_decay):
            whose = type(feature_map if self.takes_channel_decay else self).__name__
            raise UsageError(f"decay: {whose} does not support channel. Use learned.")
        lengths = memory_lengths(heads, longest_memory)
        if decay in ("learned", "channel"):
            start, rank = (lengths - 1).log(), None  # a gate begins with these memories
            if self.by_channel:
                start, rank = start[:, None].expand(-1, self.feature_map.features), GATE_RANK
            self.inputs = {"log_decay": Gate("forget_gate", "log_sigmoid", start, rank), **self.inputs}
        if decay == "softplus":
            start = -torch.log1p(-1 / lengths)  # softplus of the bias
            self.inputs = {"log_decay": Gate("forget_gate", "softplus", start.expm1().log()), **self.inputs}
        fixed = torch.log1p(-1 / lengths).to(torch.get_default_device()) if decay == "fixed" else None
        self.register_buffer("log_decay", fixed, persistent=False)
        self.use_kernel("native")  # hands over to torch wherever native code cannot compute

    def features_of(self, feature_map: FeatureMap) -> FeatureMap:
        """Return the feature map that the recurrence uses, given the configured one."""
        return feature_map

    def own_gates(self) -> dict[str, Gate]:
        """Return the gates besides the forget gate."""
        return {}

    @abstractmethod
    def pack(self, state: State) -> Tensor:
        """Return a state as the single tensor (B, H, F, ...) that kernels use."""

    @abstractmethod
    def unpack(self, packed: Tensor) -> State:
        """Return the state from its packed tensor."""

    @abstractmethod
    def step(
        self, fq: Tensor, fk: Tensor, v: Tensor, state: State, starts: Tensor | None, *gates: Tensor | None
    ) -> tuple[Tensor, State]:
        """Return the output of one token (T = 1) and the state after it; `gates` are its log decay and beta."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: State,
        document_starts: Tensor | None = None,
        inputs: Inputs = NOTHING,
    ) -> tuple[Tensor, State]:
        log_decay, beta = self.token_log_decay(q, inputs), inputs.get("beta")
        if q.shape[2] == 1:
            with without_autocast(q):
                fq, fk = self.feature_map.query(q), self.feature_map.key(k)
                return self.step(fq, fk, v, state, document_starts, log_decay, beta)
        packed, x = self.pack(state), ScanInputs(q, k, v, document_starts, log_decay, beta)
        done = self.kernel.operation(self.feature_map, packed, x)
        y, packed, *_ = done or self.apart(Scan.apply)(*self.scan_arguments(packed, x))
        return y, self.unpack(packed)

    def scan_arguments(self, packed: Tensor, x: ScanInputs) -> tuple[Any, ...]:
        """Return the arguments of `Scan` for many tokens after a packed state."""
        policy = self.policy_for(x.q)._replace(compiles=self.is_compiled)
        how = self.kernel, self.feature_map, policy, torch.is_grad_enabled()
        return *how, packed, *x, *self.feature_map.parameters()

    def token_log_decay(self, q: Tensor, inputs: Inputs) -> Tensor | None:
        """Return the log decay of each token (B, H, T) or feature (B, H, T, F): learned, fixed, or None."""
        if self.log_decay is None:
            return inputs["log_decay"] if "log_decay" in self.inputs else None
        return self.log_decay.to(at_least_float32(q.dtype))[None, :, None].expand(q.shape[:3])
