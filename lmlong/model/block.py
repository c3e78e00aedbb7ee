"""One block of the language model: norm, q, k, v, short convolution, attention, gate; norm, MLP.

B batch, T time, H heads.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, silu

from lmlong import recipe
from lmlong.attention.inputs import Gate, GateProjection, Inputs, Rotated
from lmlong.attention.plugins import in_words
from lmlong.attention.registry import CAUSAL
from lmlong.errors import UsageError
from lmlong.model.layers import Linear, RMSNorm, StackedLinear, SwiGLU
from lmlong.model.rope import apply_rope
from lmlong.model.short_conv import ShortConvolution
from lmlong.model.stretch import Stretch


class BlockState(NamedTuple):
    attention: Any  # the state of the attention
    tail: Tensor | None  # the last inputs of the convolution


BlockStates = tuple[BlockState, ...]
"""The states of mixers, in the order in which a token passes them. A layer with added n-gram heads has two."""

CallFor = Callable[[int], Callable[..., Any]]
"""Returns what a block and its inputs are handed to, for a number of tokens (`TextModel.call_for`)."""

SHARED_PARTS = frozenset({"norm", "in_proj", "convolution", "head_norm", "out_proj"})
"""The parts of a mixer that every attention has; the rest are the attention and its gates."""


class Mixer(nn.Module):
    """Gated causal attention over convolved queries, keys and values."""

    def __init__(self, options: recipe.Model, kind: str):
        super().__init__()
        width, self.heads = options.width, options.heads
        self.norm = RMSNorm(width, epsilon=options.norm_epsilon)
        head_dim, value_dim = options.head_dims
        has_keys = recipe.ATTENTION_KINDS[kind].has_keys
        self.kv_heads = (options.kv_heads if has_keys else None) or self.heads
        keys = [self.heads * head_dim, self.kv_heads * head_dim] if has_keys else [0, 0]
        self.qkv_widths = [*keys, self.kv_heads * value_dim]
        self.gate_width = self.heads * value_dim if options.output_gate else 0
        self.in_proj = StackedLinear(width, [*self.qkv_widths, self.gate_width])
        self.convolution = ShortConvolution(sum(self.qkv_widths), options.convolution) if options.convolution else None
        self.attention = CAUSAL[kind](self.heads, head_dim, value_dim, options.attention)
        self.repeats = 1 if self.attention.group_heads(self.kv_heads) else self.heads // self.kv_heads
        self.uses_rope = options.uses_rope(kind)
        self.rotary, self.rope = options.positions != "none", options.rope
        for gate in self.attention.inputs.values():
            if isinstance(gate, Gate):
                if gate.name in SHARED_PARTS or hasattr(self, gate.name) or not gate.name.isidentifier():
                    raise UsageError(
                        f"{in_words(self.attention)}: its gate cannot be named {gate.name!r}: the block has another "
                        "part of this name. Give the gate another name."
                    )
                self.add_module(gate.name, GateProjection(width, gate))
        normed = options.head_norm and self.attention.normalizes_heads
        self.head_norm = RMSNorm(self.heads, value_dim, epsilon=options.norm_epsilon) if normed else None
        self.out_proj = Linear(self.heads * value_dim, width)

    def init_recall(self) -> None:
        """Initialize keys as the queries of the previous token, and both as codes of the last tokens, if the attention
        `starts_with_recall`."""
        if self.attention.starts_with_recall and self.convolution is not None and self.convolution.width > 1:
            begin, size, _ = self.qkv_widths
            queries, keys = slice(begin), slice(begin, begin + size)
            # the first of the query heads that share a key head
            first = torch.arange(begin).unflatten(0, (self.kv_heads, -1, size // self.kv_heads))[:, 0].flatten()
            self.in_proj.weight[keys] = self.in_proj.weight[queries][first]
            self.convolution.init_codes(queries, keys, first)

    def init_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> BlockState:
        tail = self.convolution.init_state(batch, device, dtype) if self.convolution else None
        return BlockState(self.attention.init_state(batch, device, dtype), tail)

    def forward(self, x: Tensor, state: BlockState, stretch: Stretch) -> tuple[Tensor, BlockState]:
        x = self.norm(x)
        qkv, gate = self.in_proj(x).split([sum(self.qkv_widths), self.gate_width], dim=-1)
        tail = state.tail
        if self.convolution is not None and tail is not None:
            if stretch.part is not None:
                tail, qkv = stretch.part.tail(tail, qkv)
            qkv, tail = self.convolution(qkv, tail, stretch.in_document, stretch.document_starts)
        q, k, v = self.split_heads(qkv)
        inputs = self.attention_inputs(x, q, k, stretch)
        if self.uses_rope:
            q, k = (apply_rope(part, stretch.in_document, self.rope) for part in (q, k))
        attention, starts = state.attention, stretch.document_starts
        if stretch.part is not None:
            attention, v = stretch.part.attention_state(self.attention, attention, k, v, starts, inputs)
        y, attention = self.attention(q, k, v, attention, starts, inputs)
        y = y.transpose(1, 2)
        if self.head_norm is not None:
            y = self.head_norm(y)
        y = y.flatten(2)
        if self.gate_width:
            y = y * silu(gate)
        return self.out_proj(y), BlockState(attention, tail)

    def split_heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v (B, H, T, D) from their concatenated channels (B, T, C)."""
        q, k, v = qkv.split(self.qkv_widths, dim=-1)
        q, k, v = (
            part.unflatten(-1, (heads, part.shape[-1] // heads)).transpose(1, 2)
            for part, heads in ((q, self.heads), (k, self.kv_heads), (v, self.kv_heads))
        )
        if self.repeats > 1:
            k, v = (part.repeat_interleave(self.repeats, dim=1) for part in (k, v))
        return q, k, v

    def attention_inputs(self, x: Tensor, q: Tensor, k: Tensor, stretch: Stretch) -> Inputs:
        """Return the inputs that the attention declares, computed from the normed x (B, T, width), q and k."""
        inputs = {}
        for name, declared in self.attention.inputs.items():
            if isinstance(declared, Gate):
                inputs[name] = getattr(self, declared.name)(x)
            elif isinstance(declared, Rotated):
                part = q if declared.of == "q" else k
                inputs[name] = apply_rope(part, stretch.in_document, self.rope) if self.rotary else part
            else:
                assert stretch.last_tokens is not None
                inputs[name] = declared.make(stretch.last_tokens[..., -declared.size :])
        return inputs

    @property
    def rotates(self) -> bool:
        """Whether any part of the attention uses queries and keys with rotary positions."""
        asked = any(isinstance(declared, Rotated) for declared in self.attention.inputs.values())
        return self.uses_rope or (asked and self.rotary)


class ResidualBlock(nn.Module):
    """x + mixer(x), then x + mlp(x)."""

    mixer: nn.Module

    def __init__(self, options: recipe.Model, mixer: nn.Module):
        super().__init__()
        self.mixer = mixer
        self.mlp = SwiGLU(options)
        self.dropout = options.dropout

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """Add the output of a part of the block to the residual stream x."""
        return x + dropout(y, self.dropout, self.training)


class Block(ResidualBlock):
    """A block of the language model, with n-gram heads between its mixer and its MLP if `model.add_ngram` names it.

    The output projection of new n-gram heads is 0, so they do not change a trained model until they are trained.
    """

    mixer: Mixer

    def __init__(self, options: recipe.Model, kind: str, add_ngram: bool = False):
        super().__init__(options, Mixer(options.of_kind(kind), kind))
        self.ngram = Mixer(options.of_kind("ngram"), "ngram") if add_ngram else None

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """The mixers, in the order in which a token passes them."""
        return (self.mixer,) if self.ngram is None else (self.mixer, self.ngram)

    def forward(self, x: Tensor, states: BlockStates, stretch: Stretch) -> tuple[Tensor, BlockStates]:
        first, *rest = states
        mixed, first = self.mixer(x, first, stretch)
        x, after = self.finish(x, mixed, tuple(rest), stretch)
        return x, (first, *after)

    def finish(self, x: Tensor, mixed: Tensor, states: BlockStates, stretch: Stretch) -> tuple[Tensor, BlockStates]:
        """Return the output of the block, given its input x and the output of its first mixer, and the states of the
        other mixers."""
        x, after = self.add(x, mixed), []
        for mixer, state in zip(self.mixers[1:], states, strict=True):
            mixed, state = mixer(x, state, stretch)
            x = self.add(x, mixed)
            after.append(state)
        return self.add(x, self.mlp(x)), tuple(after)


def with_states(blocks: Iterable[Block], states: BlockStates) -> Iterator[tuple[Block, BlockStates]]:
    """Iterate over blocks with the states of their mixers."""
    rest = iter(states)
    for block in blocks:
        yield block, tuple(islice(rest, len(block.mixers)))
    assert next(rest, None) is None


def run_blocks(
    blocks: Iterable[Block], x: Tensor, states: BlockStates, stretch: Stretch, call_for: CallFor
) -> tuple[Tensor, BlockStates]:
    """Run blocks in sequence."""
    call, after = call_for(x.shape[1]), list[BlockState]()
    for block, own in with_states(blocks, states):
        x, own = call(block, x, own, stretch)
        after.extend(own)
    return x, tuple(after)
