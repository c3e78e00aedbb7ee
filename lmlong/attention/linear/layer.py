"""Kernel linear attention: a feature map, an optional forget gate, and the scan over S and z.

B batch, H heads, T time.
"""

import ctypes
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from lmlong import recipe
from lmlong.attention.base import CausalAttention
from lmlong.attention.feature_map_registry import FEATURE_MAPS
from lmlong.attention.fla import FlaLinear
from lmlong.attention.inputs import NOTHING, Inputs
from lmlong.attention.linear.chunk import ChunkKernel
from lmlong.attention.linear.effect import LinearEffect, linear_effect
from lmlong.attention.linear.naive import MIN_DENOMINATOR, LinearState, quadratic, recurrent_step
from lmlong.attention.linear.native import NativeLinear
from lmlong.attention.linear.triton import TritonLinear
from lmlong.attention.native_weights import pack_features, pack_forgetting
from lmlong.attention.parallel_window.layer import with_window
from lmlong.attention.recurrence import Recurrence
from lmlong.attention.scan import Scan, ScanInputs
from lmlong.native.decode.kind import DecodeKind, Packer
from lmlong.native.decode.structures import FeatureMapWeights, Forgetting, ints, pointers, structure


class LinearDecode(DecodeKind[LinearState]):
    name = "LinearAttention"
    header = Path(__file__).with_name("decode.h")
    weights = structure("LinearAttention::Weights", ("features", FeatureMapWeights), ("forgetting", Forgetting))
    state = structure("LinearAttention::State", *pointers(*LinearState._fields), *ints("float64"))
    takes_float64 = True
    constants = MappingProxyType({"MIN_DENOMINATOR": MIN_DENOMINATOR})

    def pack(self, packer: Packer, attention: Any, gates: Mapping[str, nn.Module]) -> ctypes.Structure:
        packer.known(attention, LinearAttention)
        features = pack_features(packer, attention.feature_map)
        return self.weights(features, pack_forgetting(packer, attention, gates.get("log_decay"), features.size))


class LinearAttention(Recurrence[LinearState]):
    """Attention with sim(q, k) = phi(q) . phi(k), so that S and z summarize the whole past.

    The state is a NamedTuple of S (B, H, F, V) and z (B, H, F), in float32 or more. `decay` is none, fixed, learned or
    channel; with learned and channel, `forward` needs `inputs["log_decay"]`, (B, H, T) or (B, H, T, F).
    """

    takes_channel_decay = True
    native_decode = LinearDecode()
    kernels = MappingProxyType({"native": NativeLinear, "torch": ChunkKernel, "triton": TritonLinear, "fla": FlaLinear})

    @classmethod
    def from_options(cls, heads: int, head_dim: int, value_dim: int, options: recipe.Attention) -> CausalAttention[Any]:
        feature_map = FEATURE_MAPS[options.feature_map](heads, head_dim, options)
        return with_window(cls(heads, head_dim, value_dim, feature_map, options.decay, options.longest_memory), options)

    def init_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> LinearState:
        shape = (batch, self.heads, self.feature_map.features)
        dtype = torch.promote_types(dtype, self.state_dtype)
        return LinearState(
            S=torch.zeros(*shape, self.value_dim, device=device, dtype=dtype),
            z=torch.zeros(*shape, device=device, dtype=dtype),
        )

    def pack(self, state: LinearState) -> Tensor:
        """Return (B, H, F, V + 1), with z as the last column of S."""
        return torch.cat([state.S, state.z[..., None]], dim=-1)

    def unpack(self, packed: Tensor) -> LinearState:
        return LinearState(packed[..., :-1].contiguous(), packed[..., -1].contiguous())

    def step(
        self, fq: Tensor, fk: Tensor, v: Tensor, state: LinearState, starts: Tensor | None, *gates: Tensor | None
    ) -> tuple[Tensor, LinearState]:
        y, state = recurrent_step(fq, fk, v.to(fq.dtype), state, starts, gates[0])
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
        x = ScanInputs(q, k, v, document_starts, self.token_log_decay(q, inputs))
        return Scan.apply(ChunkKernel(), self.feature_map, self.policy_for(q), False, self.pack(state), *x)[2]

    def reference(
        self, q: Tensor, k: Tensor, v: Tensor, document_starts: Tensor | None = None, inputs: Inputs = NOTHING
    ) -> Tensor:
        fq, fk = self.feature_map.query(q), self.feature_map.key(k)
        return quadratic(fq, fk, v, document_starts, self.token_log_decay(q, inputs))

    def effect(
        self, k: Tensor, v: Tensor, document_starts: Tensor | None = None, inputs: Inputs = NOTHING
    ) -> LinearEffect:
        dtype, log_decay = torch.promote_types(v.dtype, self.state_dtype), self.token_log_decay(k, inputs)
        return linear_effect(self.feature_map, k, v, document_starts, log_decay, dtype, self.policy_for(v))

    def after_effect(self, state: LinearState, effect: LinearEffect) -> LinearState:
        return self.unpack(effect.on(self.pack(state)))
