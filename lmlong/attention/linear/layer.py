"""Kernel linear attention: a feature map, an optional forget gate, and the scan over S and z.

B batch, H heads, T time.
"""

from collections.abc import Collection
from types import MappingProxyType

import torch
from torch import Tensor

from lmlong.attention.inputs import NOTHING, Inputs
from lmlong.attention.linear import chunk, native, triton
from lmlong.attention.linear.autograd import Scan, scan_forward
from lmlong.attention.linear.naive import LinearState, quadratic, recurrent_step
from lmlong.attention.linear.native.decode import DECODE
from lmlong.attention.linear.onnx import linear_graph
from lmlong.attention.recurrence import Recurrence
from lmlong.attention.scan import IdentityFeatures, ScanInputs, without_autocast
from lmlong.native.onnx.graph import Value
from lmlong.native.onnx.layer import GraphReader, LayerInputs
from lmlong.native.spec import NativeSpec


class LinearAttention(Recurrence[LinearState]):
    """sim(q, k) = phi(q) . phi(k), so that the whole past fits into S and z."""

    kernel: Scan
    takes_channel_decay = True
    native_decode = DECODE

    @property
    def traceable_kernels(self) -> Collection[str]:
        """Those of Triton, but for a decay by channel."""
        return () if self.by_channel else ("triton",)

    kernels = MappingProxyType({"native": lambda: native.scan, "torch": lambda: chunk.scan, "triton": triton.load_scan})

    def init_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> LinearState:
        shape = (batch, self.heads, self.feature_map.features)
        dtype = torch.promote_types(dtype, self.state_dtype)
        return LinearState(
            S=torch.zeros(*shape, self.value_dim, device=device, dtype=dtype),
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
            found = scan_forward(chunk.ChunkKernel(), IdentityFeatures(), of_scan, *state)[0].denominators
        assert found is not None
        return found

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
        return self.heads * self.feature_map.features * (self.value_dim + 1)

    def native_spec(self) -> NativeSpec:
        return NativeSpec("linear", weights={"log_decay": self.log_decay}, parts={"feature_map": self.feature_map})

    def onnx(self, reader: GraphReader, x: LayerInputs) -> Value:
        return linear_graph(reader, reader.open(self), x)
