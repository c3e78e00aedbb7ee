"""n-gram attention: what followed the last n tokens at their earlier occurrences in the document.

Each row of the state belongs to one n-gram, and holds the sum and the number of the values that followed it. The value
of a token is added to the row of the n tokens before it; if the row belongs to another n-gram, it is cleared first.
Then the row of the last n tokens is read, if it belongs to them.

B batch, H heads, T time, V value dim, R rows (`buckets`).
"""

import ctypes
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from lmlong import recipe
from lmlong.attention.base import CausalAttention, at_least_float32, causal_mask
from lmlong.attention.inputs import NOTHING, Gate, Inputs, LastTokens
from lmlong.attention.native_weights import pack_gate
from lmlong.attention.ngram.hashing import NO_NGRAM, ngram_hashes, row_of
from lmlong.attention.ngram.native.kernel import NativeNgram
from lmlong.attention.ngram.sort import SortKernel
from lmlong.attention.ngram.state import RECENT, WAITING, NgramEffect, NgramState, OwnedNgramState, empty_state
from lmlong.attention.ngram.step import make_room, settle, step
from lmlong.attention.scan import without_autocast
from lmlong.native.decode.kind import DecodeKind, Packer
from lmlong.native.decode.structures import Gate as GateWeights
from lmlong.native.decode.structures import ints, pointers, structure
from lmlong.recipe.kinds import ATTENTION_KINDS


class NgramDecode(DecodeKind[NgramState]):
    name = "NgramAttention"
    header = Path(__file__).with_name("decode.h")
    weights = structure(
        "NgramAttention::Weights",
        *ints("rows"),
        *pointers("sizes"),
        ("read_gate", GateWeights),
        *pointers("number_weight", "raw_smoothing"),
    )
    state = structure("NgramAttention::State", *pointers(*NgramState._fields))
    constants = MappingProxyType({"RECENT": RECENT, "WAITING": WAITING})

    def pack(self, packer: Packer, attention: Any, gates: Mapping[str, nn.Module]) -> ctypes.Structure:
        packer.known(attention, NgramAttention)
        sizes = packer.address(torch.tensor(attention.sizes))
        gate = pack_gate(packer, gates["read_gate"], "identity", attention.heads)
        weights = (packer.floats(attention, x) for x in (attention.number_weight, attention.raw_smoothing))
        return self.weights(attention.buckets, sizes, gate, *weights)

    def each_written(self, change: Callable[[Tensor], Tensor], state: NgramState) -> NgramState:
        """Change only the recent values: a step writes neither to the table nor to the waiting values."""
        return NgramState(*state[:5], *map(change, state[5:]))

    def with_room(self, state: NgramState, full: bool) -> NgramState:
        return make_room(state) if full else state


class NgramAttention(CausalAttention[NgramState]):
    """Linear attention with one-hot features, given by the hash of the last n tokens.

    A head reads the mean of the values that followed the last n tokens earlier in the document, and exactly 0 if they
    are new. It has neither queries nor keys.
    """

    kernels = MappingProxyType({"native": NativeNgram, "torch": SortKernel})
    kernel: SortKernel
    has_keys = ATTENTION_KINDS["ngram"].has_keys
    normalizes_heads = False
    reads_alone = True
    native_decode = NgramDecode()

    def __init__(self, heads: int, head_dim: int, value_dim: int, sizes: list[int], buckets: int):
        super().__init__()
        self.heads, self.head_dim, self.value_dim, self.buckets = heads, head_dim, value_dim, buckets
        self.sizes = [sizes[head % len(sizes)] for head in range(heads)]
        self.inputs = {
            "ngram": LastTokens(max(self.sizes) + 1, partial(ngram_hashes, sizes=self.sizes)),
            "read_gate": Gate("read_gate", "identity", torch.zeros(heads)),
        }
        self.use_kernel("native")
        self.number_weight = nn.Parameter(torch.zeros(heads, heads))
        self.raw_smoothing = nn.Parameter(torch.zeros(heads))

    @classmethod
    def from_options(cls, heads: int, head_dim: int, value_dim: int, options: recipe.Attention) -> "NgramAttention":
        return cls(heads, head_dim, value_dim, options.ngram.sizes, options.ngram.buckets)

    def init_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> NgramState:
        return empty_state((batch, self.heads, self.buckets), self.value_dim, device, at_least_float32(dtype))

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: NgramState,
        document_starts: Tensor | None = None,
        inputs: Inputs = NOTHING,
    ) -> tuple[Tensor, NgramState]:
        hashes = inputs["ngram"]
        if v.shape[2] == 0:
            return v, state
        policy = self.policy_for(v)
        if v.shape[2] == 1 and document_starts is None and not torch.is_grad_enabled():
            sums, numbers, state = step(v, hashes, state, policy)
        else:
            settled = settle(state, policy)
            sums, numbers, state = self.apart(self.kernel.read)(v, hashes, document_starts, settled)
        return self._gated(sums, numbers, inputs["read_gate"]).to(v.dtype), state

    def outputs(
        self, q: Tensor, k: Tensor, v: Tensor, document_starts: Tensor | None = None, inputs: Inputs = NOTHING
    ) -> Tensor:
        if v.shape[2] == 0:
            return v
        sums, numbers = self.apart(self.kernel.read_alone)(v, inputs["ngram"], document_starts, self.buckets)
        return self._gated(sums, numbers, inputs["read_gate"]).to(v.dtype)

    def effect(
        self, k: Tensor, v: Tensor, document_starts: Tensor | None = None, inputs: Inputs = NOTHING
    ) -> NgramEffect:
        hashes, empty = inputs["ngram"], self.init_state(len(v), v.device, v.dtype)
        *_, (S, number, ngram, *_) = self.kernel.read(v, hashes, document_starts, empty)
        written = hashes[..., 0]
        row, writes = row_of(written.clamp_min(0), self.buckets), (written != NO_NGRAM).to(number.dtype)
        # a row holds the values since it was last cleared: all that were written if no other n-gram wrote to it
        single = torch.zeros_like(number).scatter_add_(2, row, writes) == number
        begun = v.new_zeros(len(v), dtype=torch.bool) if document_starts is None else document_starts.any(1)
        return NgramEffect(S, number, ngram, single, begun)

    def after_effect(self, state: NgramState, effect: NgramEffect) -> NgramState:
        state, begun = self.settle(state), effect.begun[:, None, None]
        written = effect.number > 0
        kept = ~begun & (~written | (effect.single & (state.ngram == effect.ngram)))
        return state._replace(
            S=state.S.masked_fill(~kept[..., None], 0) + effect.S.to(state.S.dtype),
            number=state.number * kept + effect.number,
            ngram=torch.where(written, effect.ngram, state.ngram.masked_fill(begun, NO_NGRAM)),
        )

    def settle(self, state: NgramState) -> NgramState:
        return settle(state, self.policy_for(state.S))

    def owned(self, state: NgramState) -> NgramState:
        return OwnedNgramState(*state)

    def reference(
        self, q: Tensor, k: Tensor, v: Tensor, document_starts: Tensor | None = None, inputs: Inputs = NOTHING
    ) -> Tensor:
        sums, numbers = quadratic(v, inputs["ngram"], document_starts, self.buckets)
        return self._gated(sums, numbers, inputs["read_gate"]).to(v.dtype)

    def _gated(self, sums: Tensor, numbers: Tensor, gate: Tensor) -> Tensor:
        """Return the smoothed means of the values times a gate, which depends on the counts of all heads."""
        dtype = at_least_float32(sums.dtype)
        sums, numbers = sums.to(dtype), numbers.to(dtype)
        with without_autocast(sums):
            seen = torch.einsum("hj,bjt->bht", self.number_weight.to(dtype), numbers.log1p())
            weight = (gate.to(dtype) + seen).sigmoid() / (numbers + self.raw_smoothing.to(dtype).exp()[:, None])
            return sums * weight[..., None]


def quadratic(v: Tensor, hashes: Tensor, document_starts: Tensor | None, buckets: int) -> tuple[Tensor, Tensor]:
    """Return the sum (B, H, T, V) and the number (B, H, T) of the values in the row that each token reads, by a T x T
    matrix of weights. Slow; the reference."""
    written, read = hashes.unbind(-1)  # (B, H, T)
    time = torch.arange(v.shape[2], device=v.device)
    # (B, H, T, T): read at t, written at s <= t
    past = causal_mask(len(time), v.device, document_starts) & (written != NO_NGRAM)[..., None, :]
    same_row = row_of(written, buckets)[..., None, :] == row_of(read, buckets)[..., :, None]
    same_ngram = written[..., None, :] == read[..., :, None]
    cleared = torch.where(past & same_row & ~same_ngram, time, -1).amax(-1, keepdim=True)
    weights = (past & same_ngram & (time > cleared)).to(v.dtype)
    return weights @ v, weights.sum(-1)
