"""Kernel linear attention: a feature map, an optional forget gate, and the scan over S and z.

B batch, H heads, T time, F features, V value dim.
"""

import ctypes
from collections.abc import Mapping
from functools import reduce
from itertools import repeat
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from lmlong import recipe
from lmlong.attention.base import CausalAttention
from lmlong.attention.chunks import to_chunks
from lmlong.attention.feature_map_registry import FEATURE_MAPS
from lmlong.attention.fla import FlaLinear
from lmlong.attention.inputs import NOTHING, Inputs
from lmlong.attention.linear.chunk import ChunkKernel
from lmlong.attention.linear.naive import MIN_DENOMINATOR, LinearState, quadratic, recurrent_step
from lmlong.attention.linear.native import NativeLinear
from lmlong.attention.linear.triton import TritonLinear
from lmlong.attention.native_weights import pack_features, pack_forgetting
from lmlong.attention.parallel_window.layer import with_window
from lmlong.attention.recurrence import Recurrence
from lmlong.attention.scan import Scan, ScanInputs, recomputed, span_tokens, without_autocast
from lmlong.native.decode.kind import DecodeKind, Packer
from lmlong.native.decode.structures import FeatureMapWeights, Forgetting, ints, pointers, structure


class LinearEffect(NamedTuple):
    """What tokens do to a packed state, in the dtype of states:

        S' = r S + sum_t u_t fk_t [v_t, 1]^T,  u_t = g_(t+1) ... g_T,  r = g_1 ... g_T

    u_t is 0 for tokens before the last document start, and r is 0 if a document starts. With a decay for each channel,
    u and r have a value for each feature. Nothing is read within the tokens, so no scan is needed.
    """

    transition: Tensor  # (B, H, 1), or (B, H, F) by channel: r
    added: Tensor  # (B, H, F, V + 1)

    def on(self, packed: Tensor) -> Tensor:
        """Return the packed state (B, H, F, V + 1) after the tokens, given the one before them."""
        return packed * self.transition[..., None].to(packed.dtype) + self.added.to(packed.dtype)

    def then(self, later: "LinearEffect") -> "LinearEffect":
        """Return the effect of these tokens followed by others."""
        return LinearEffect(self.transition * later.transition, later.on(self.added))


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
        """Return the effect of tokens, computed from as many at once as the memory for temporary tensors allows.
        Autograd keeps only the inputs, and the rest is computed again for the gradients."""
        dtype, log_decay = torch.promote_types(v.dtype, self.state_dtype), self.token_log_decay(k, inputs)
        numbers = (6 if self.by_channel else 5) * self.feature_map.features + v.shape[3]  # estimated, of a head's token
        tokens = span_tokens(v, self.policy_for(v), numbers * dtype.itemsize)
        keys, values = k.split(tokens, dim=2), v.split(tokens, dim=2)
        starts = repeat(None) if document_starts is None else document_starts.bool().split(tokens, dim=1)
        decays = repeat(None) if log_decay is None else log_decay.split(tokens, dim=2)
        spans = zip(keys, values, starts, decays, strict=False)
        return reduce(LinearEffect.then, [recomputed(self._effect_of_span, *span, dtype) for span in spans])

    def after_effect(self, state: LinearState, effect: LinearEffect) -> LinearState:
        return self.unpack(effect.on(self.pack(state)))

    def _effect_of_span(
        self, k: Tensor, v: Tensor, starts: Tensor | None, log_decay: Tensor | None, dtype: torch.dtype
    ) -> LinearEffect:
        with without_autocast(k):
            fk = self.feature_map.key(k)
            weights, transition = None, k.new_ones(*k.shape[:2], 1, dtype=dtype)
            if log_decay is not None:
                log_decay = (log_decay[..., None] if log_decay.ndim == 3 else log_decay).to(dtype)
                later = pad(log_decay[:, :, 1:], (0, 0, 0, 1)).flip(2).cumsum(2).flip(2)  # a difference would cancel
                weights, transition = later.exp(), log_decay.sum(2).exp()
            if starts is not None:
                document = starts.cumsum(1)
                current = (document == document[:, -1:])[:, None, :, None]
                weights = current.to(dtype) if weights is None else weights.masked_fill(~current, 0)
                transition = transition.masked_fill(starts.any(1)[:, None, None], 0)
            if weights is not None:
                fk = fk * weights.to(fk.dtype)
            keys, values = to_chunks(fk), to_chunks(v.to(fk.dtype))
            # the sums of chunks are added in `dtype`: one product over all tokens would round more in bfloat16
            of_values = (keys.mT @ values).sum(0, dtype=dtype)
            return LinearEffect(transition, torch.cat([of_values, fk.sum(2, dtype=dtype)[..., None]], dim=-1))
