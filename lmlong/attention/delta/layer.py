"""The delta rule: linear attention that replaces the value stored under a key instead of adding to it.

B batch, H heads, T time, F features, V value dim.
"""

import ctypes
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from lmlong import recipe
from lmlong.attention.base import CausalAttention
from lmlong.attention.delta.chunk import ChunkKernel
from lmlong.attention.delta.naive import INNER, TINY, DeltaState, UnitFeatures, recurrent
from lmlong.attention.delta.native import NativeDelta
from lmlong.attention.feature_maps import FeatureMap
from lmlong.attention.fla import FlaDelta
from lmlong.attention.inputs import NOTHING, Gate, Inputs
from lmlong.attention.native_weights import pack_features, pack_forgetting, pack_gate
from lmlong.attention.parallel_window.layer import with_window
from lmlong.attention.recurrence import Recurrence
from lmlong.attention.scan import Scan, ScanInputs, recomputed, without_autocast
from lmlong.native.decode.kind import DecodeKind, Packer
from lmlong.native.decode.structures import FeatureMapWeights, Forgetting, ints, pointers, structure
from lmlong.native.decode.structures import Gate as GateWeights

BETA_START = 2.0
"""Initial logit of beta, which is then 0.88. Models that start at one half learn to recall later, or never."""


class DeltaEffect(NamedTuple):
    """What tokens do to the state S before them: M S + U."""

    transition: Tensor  # (B, H, F, F) M, in the dtype of states
    added: Tensor  # (B, H, F, V) U


class DeltaDecode(DecodeKind[DeltaState]):
    name = "DeltaAttention"
    header = Path(__file__).with_name("decode.h")
    weights = structure(
        "DeltaAttention::Weights",
        ("features", FeatureMapWeights),
        ("forgetting", Forgetting),
        ("beta", GateWeights),
        *ints("max_beta"),
    )
    state = structure("DeltaAttention::State", *pointers(*DeltaState._fields), *ints("float64"))
    takes_float64 = True
    constants = MappingProxyType({"UNIT_TINY": TINY})

    def pack(self, packer: Packer, attention: Any, gates: Mapping[str, nn.Module]) -> ctypes.Structure:
        packer.known(attention, DeltaAttention)
        features = pack_features(packer, packer.known(attention.feature_map, UnitFeatures).inner)
        forgetting = pack_forgetting(packer, attention, gates.get("log_decay"))
        beta = pack_gate(packer, gates["beta"], ("sigmoid", "double_sigmoid"), attention.heads)
        return self.weights(features, forgetting, beta, 1 if attention.inputs["beta"].activation == "sigmoid" else 2)


class DeltaAttention(Recurrence[DeltaState]):
    """S_t = a (I - b k k^T) S_(t-1) + b k v^T, y_t = S_t^T q_t, with queries and keys of length one.

    With b = 1, a value replaces the value stored under its key. The gates a and b of each head are learned from the
    token. It has no denominator; the block normalizes each head instead.
    """

    starts_with_recall = True
    native_decode = DeltaDecode()
    kernels = MappingProxyType({"native": NativeDelta, "torch": ChunkKernel, "fla": FlaDelta})

    @classmethod
    def from_options(cls, heads: int, head_dim: int, value_dim: int, options: recipe.Attention) -> CausalAttention[Any]:
        feature_map, how = INNER[options.delta.feature_map](head_dim), (options.decay, options.longest_memory)
        delta = cls(heads, head_dim, value_dim, feature_map, *how)
        start = torch.full((heads,), BETA_START if options.delta.beta_bias else 0.0)
        activation: Any = "sigmoid" if options.delta.max_beta == 1 else "double_sigmoid"
        delta.inputs = {**delta.inputs, "beta": Gate("beta", activation, start, biased=options.delta.beta_bias)}
        return with_window(delta, options)

    def features_of(self, feature_map: FeatureMap) -> FeatureMap:
        return UnitFeatures(feature_map)

    def own_gates(self) -> dict[str, Gate]:
        return {"beta": Gate("beta", "sigmoid", torch.full((self.heads,), BETA_START))}

    def init_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> DeltaState:
        shape = (batch, self.heads, self.feature_map.features, self.value_dim)
        return DeltaState(torch.zeros(*shape, device=device, dtype=torch.promote_types(dtype, self.state_dtype)))

    def pack(self, state: DeltaState) -> Tensor:
        return state.S

    def unpack(self, packed: Tensor) -> DeltaState:
        return DeltaState(packed)

    def step(
        self, fq: Tensor, fk: Tensor, v: Tensor, state: DeltaState, starts: Tensor | None, *gates: Tensor | None
    ) -> tuple[Tensor, DeltaState]:
        log_decay, beta = gates
        assert beta is not None
        return recurrent(fq, fk, v, beta, state, starts, log_decay)

    def reference(
        self, q: Tensor, k: Tensor, v: Tensor, document_starts: Tensor | None = None, inputs: Inputs = NOTHING
    ) -> Tensor:
        fq, fk = self.feature_map.query(q), self.feature_map.key(k)
        empty = DeltaState(fk.new_zeros(*fk.shape[:2], fk.shape[-1], v.shape[-1]))  # values may be of any width here
        return recurrent(fq, fk, v, inputs["beta"], empty, document_starts, self.token_log_decay(q, inputs))[0]

    def effect(
        self, k: Tensor, v: Tensor, document_starts: Tensor | None = None, inputs: Inputs = NOTHING
    ) -> DeltaEffect:
        x = ScanInputs(k, k, v, document_starts, self.token_log_decay(k, inputs), inputs["beta"])
        added, transition = recomputed(self._after_identity, x).split([v.shape[-1], self.feature_map.features], dim=-1)
        return DeltaEffect(transition, added)

    def _after_identity(self, x: ScanInputs) -> Tensor:
        """Return [U, M], by one scan of the values [v, 0] from the state [0, I]: values change only their own columns
        of the state, and a document start resets all."""
        features, dtype = self.feature_map.features, torch.promote_types(x.v.dtype, self.state_dtype)
        identity = torch.eye(features, device=x.v.device, dtype=dtype)
        before = pad(identity, (x.v.shape[-1], 0)).expand(*x.v.shape[:2], -1, -1).contiguous()
        x = x._replace(v=pad(x.v, (0, features)))
        done = self.kernel.operation(self.feature_map, before, x)
        _, after, *_ = done or self.apart(Scan.apply)(*self.scan_arguments(before, x))
        return after

    def after_effect(self, state: DeltaState, effect: DeltaEffect) -> DeltaState:
        with without_autocast(state.S):
            return DeltaState(effect.transition.to(state.S.dtype) @ state.S + effect.added.to(state.S.dtype))
