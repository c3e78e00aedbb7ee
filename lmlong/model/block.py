"""One block of the language model: norm, queries, keys and values, short convolution, attention, gate; norm, MLP.

B batch, T time, H heads.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, logsigmoid, rms_norm, silu

from lmlong import recipe
from lmlong.attention import CAUSAL
from lmlong.attention.linear import memory_lengths, placed
from lmlong.model.convolution import ShortConvolution
from lmlong.model.positions import rotate
from lmlong.model.products import Product

FASTEST_DECAY = 20.0
"""A gate forgets at most all but exp(-20) of the state in one token, so that sums of log decays stay exact."""


class Norm(nn.Module):
    """Root-mean-square norm with a gain, computed in float32 at least."""

    def __init__(self, *shape: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(*shape))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, x.shape[-1:], eps=1e-6) * self.weight


class Place(NamedTuple):
    """Where the tokens of a batch stand."""

    positions: Tensor  # (B, T) tokens before it in its document
    starts: Tensor | None  # (B, T) bool, the first token of a document; None when none begins here


class BlockState(NamedTuple):
    """What one block remembers."""

    attention: Any  # the state of its attention
    tail: Tensor | None  # the last inputs of its convolution


class Mixer(nn.Module):
    """Lets tokens look at the past: gated causal attention over convolved queries, keys and values."""

    def __init__(self, options: recipe.Model, kind: str):
        super().__init__()
        width, self.heads = options.width, options.heads
        self.head_width = width // options.heads
        self.norm = Norm(width)
        self.project_in = Product(width, 4 * width)  # queries, keys, values, gate
        self.convolution = ShortConvolution(3 * width, options.convolution) if options.convolution else None
        self.attention = CAUSAL[kind](self.heads, self.head_width, options.attention)
        self.forget = Forget(width, self.heads) if self.attention.gated else None
        wanted = self.attention.turned_by_position
        self.rotary = options.positions == "rotary" or (options.positions == "auto" and wanted)
        self.head_norm = Norm(self.heads, self.head_width)
        self.project_out = Product(width, width)

    def init_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> BlockState:
        tail = self.convolution.init_state(batch, device, dtype) if self.convolution else None
        return BlockState(self.attention.init_state(batch, device, dtype), tail)

    def prefill(self, x: Tensor, state: BlockState, place: Place) -> tuple[Tensor, BlockState]:
        x = self.norm(x)
        qkv, gate = self.project_in(x).split([3 * x.shape[-1], x.shape[-1]], dim=-1)
        tail = state.tail
        if self.convolution is not None and tail is not None:
            qkv, tail = self.convolution(qkv, tail, place.positions, place.starts)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in qkv.chunk(3, dim=-1))
        if self.rotary:
            q, k = rotate(q, place.positions), rotate(k, place.positions)
        log_decay = self.forget(x) if self.forget is not None else None
        y, attention = self.attention(q, k, v, state.attention, place.starts, log_decay)
        y = self.head_norm(y.transpose(1, 2)).flatten(2)
        return self.project_out(y * silu(gate)), BlockState(attention, tail)


class Forget(nn.Module):
    """A gate in (0, 1) for each token and head, as its logarithm; it begins by remembering long."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(heads, width))
        self.bias = nn.Parameter(placed((memory_lengths(heads) - 1).log()))

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, width) -> (B, H, T), in float32 at least: bfloat16 cannot tell 0.999 from 1."""
        with torch.autocast(x.device.type, enabled=False):
            precise = torch.promote_types(x.dtype, torch.float32)
            score = x.to(precise) @ self.weight.to(precise).mT + self.bias.to(precise)
            return logsigmoid(score).clamp(min=-FASTEST_DECAY).mT


class SwiGlu(nn.Module):
    """The part of a block that works on each token alone."""

    def __init__(self, options: recipe.Model):
        super().__init__()
        inner = -(-int(options.width * options.mlp_ratio) // 32) * 32
        self.norm = Norm(options.width)
        self.project_in = Product(options.width, 2 * inner)
        self.project_out = Product(inner, options.width)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.project_in(self.norm(x)).chunk(2, dim=-1)
        return self.project_out(silu(gate) * value)


class Block(nn.Module):
    """x + mixer(x), then x + mlp(x)."""

    def __init__(self, options: recipe.Model, kind: str):
        super().__init__()
        self.mixer = Mixer(options, kind)
        self.mlp = SwiGlu(options)
        self.dropout = options.dropout

    def init_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> BlockState:
        return self.mixer.init_state(batch, device, dtype)

    def prefill(self, x: Tensor, state: BlockState, place: Place) -> tuple[Tensor, BlockState]:
        mixed, state = self.mixer.prefill(x, state, place)
        x = x + dropout(mixed, self.dropout, self.training)
        return x + dropout(self.mlp(x), self.dropout, self.training), state
