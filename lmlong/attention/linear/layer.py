"""Kernel linear attention: a feature map, an optional forget gate, and the scan over S and z.

B batch, H heads, T time.
"""

import torch
from torch import Tensor

from lmlong.attention.base import CausalAttention, at_least_float32
from lmlong.attention.feature_maps import FeatureMap
from lmlong.attention.gates import LONGEST_MEMORY, fixed_log_decay, forget_gate
from lmlong.attention.inputs import NOTHING, Inputs
from lmlong.attention.linear import native
from lmlong.attention.linear.autograd import IdentityFeatures, Scan, ScanInputs, scan_forward, without_autocast
from lmlong.attention.linear.chunk import ChunkKernel
from lmlong.attention.linear.naive import LinearState, quadratic, recurrent_step
from lmlong.native.spec import NativeSpec


class LinearAttention(CausalAttention[LinearState]):
    """sim(q, k) = phi(q) . phi(k), so that the whole past fits into S and z."""

    log_decay: Tensor | None

    def __init__(
        self,
        heads: int,
        head_dim: int,
        feature_map: FeatureMap,
        decay: str = "none",
        longest_memory: int = LONGEST_MEMORY,
    ):
        super().__init__()
        self.heads, self.head_dim, self.feature_map = heads, head_dim, feature_map
        self.largest_scale, self.uses_rope = feature_map.largest_scale, feature_map.uses_rope
        self.inputs = {"log_decay": forget_gate(heads, longest_memory)} if decay == "learned" else {}
        fixed = fixed_log_decay(heads, longest_memory) if decay == "fixed" else None
        self.register_buffer("log_decay", fixed, persistent=False)
        self.kernel: Scan = native.scan
        """The scan over many tokens: native code, chunks in torch, or Triton."""
        self.state_dtype = torch.float32
        """The least precise dtype of S and z: a float32 sum of ones stops at 2^24 without a gate."""

    def init_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> LinearState:
        shape = (batch, self.heads, self.feature_map.features)
        dtype = torch.promote_types(dtype, self.state_dtype)
        return LinearState(
            S=torch.zeros(*shape, self.head_dim, device=device, dtype=dtype),
            z=torch.zeros(*shape, device=device, dtype=dtype),
        )

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: LinearState,
        document_starts: Tensor | None = None,
        inputs: Inputs = NOTHING,
    ) -> tuple[Tensor, LinearState]:
        log_decay = self.token_log_decay(q, inputs)
        if q.shape[2] != 1:
            y, S, z = self.kernel(self.feature_map, ScanInputs(q, k, v, document_starts, log_decay), *state)
            return y, LinearState(S, z)
        with without_autocast(q):
            fq, fk = self.feature_map.query(q), self.feature_map.key(k)
            y, state = recurrent_step(fq, fk, v.to(fq.dtype), state, document_starts, log_decay)
        return y.to(v.dtype), state

    @torch.no_grad()
    def denominators(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: LinearState,
        document_starts: Tensor | None = None,
        inputs: Inputs = NOTHING,
    ) -> Tensor:
        """Return the denominators (B, H, T) of the outputs: sums of all weights, which must stay away from 0."""
        with without_autocast(q):
            fq, fk = self.feature_map.query(q), self.feature_map.key(k)
            of_scan = ScanInputs(fq, fk, v.to(fq.dtype), document_starts, self.token_log_decay(q, inputs))
            return scan_forward(ChunkKernel(), IdentityFeatures(), of_scan, *state)[0].denominators

    def reference(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        document_starts: Tensor | None = None,
        inputs: Inputs = NOTHING,
    ) -> Tensor:
        fq, fk = self.feature_map.query(q), self.feature_map.key(k)
        return quadratic(fq, fk, v, document_starts, self.token_log_decay(q, inputs))

    def state_numbers(self, tokens: int) -> int:
        return self.heads * self.feature_map.features * (self.head_dim + 1)

    def native_spec(self) -> NativeSpec:
        return NativeSpec("linear", weights={"log_decay": self.log_decay}, parts={"feature_map": self.feature_map})

    def token_log_decay(self, q: Tensor, inputs: Inputs) -> Tensor | None:
        """Return the log decay of each token: the learned one, the fixed one, or none."""
        if self.log_decay is None:
            return inputs["log_decay"] if self.inputs else None
        return self.log_decay.to(at_least_float32(q.dtype))[None, :, None].expand(q.shape[:3])
