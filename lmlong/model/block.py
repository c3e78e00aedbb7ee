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
from lmlong.model.layers import Linear, RMSNorm, StackedLinear, SwiGLU, block_norm
from lmlong.model.rope import apply_rope
from lmlong.model.short_conv import ShortConvolution
from lmlong.model.stretch import Stretch


class BlockState(NamedTuple):
    attention: Any  # the state of the attention; None before a text whose state is not wanted
    tail: Tensor | None  # the last inputs of the convolution


BlockStates = tuple[BlockState, ...]
"""The states of mixers, in the order in which a token passes them. A layer with added n-gram heads has two."""

CallFor = Callable[[int], Callable[..., Any]]
"""Returns what a block and its inputs are handed to, for a number of tokens (`TextModel.call_for`)."""

GATES: dict[str, Callable[[Tensor], Tensor]] = {"silu": silu, "sigmoid": torch.sigmoid, "identity": lambda x: x}
"""Functions of an output gate."""

SHARED_PARTS = frozenset({"norm", "in_proj", "convolution", "query_norm", "key_norm", "head_norm", "out_proj"})
"""The parts of a mixer that every attention has; the rest are the attention and its gates."""


class Mixer(nn.Module):
    """Gated causal attention over convolved queries, keys and values."""

    def __init__(self, options: recipe.Model, kind: str):
        super().__init__()
        width, self.heads = options.width, options.heads
        self.norm, self.norm_after = block_norm(options), options.norm == "after"
        head_dim, value_dim = options.head_dims
        about = recipe.ATTENTION_KINDS[kind]
        kv_heads = (options.kv_heads if about.has_keys else None) or self.heads
        key_heads = options.key_heads if about.recurrent else None
        self.qkv_heads = [key_heads, key_heads, self.heads] if key_heads else [self.heads, kv_heads, kv_heads]
        sizes = [head_dim, head_dim, value_dim] if about.has_keys else [0, 0, value_dim]
        self.qkv_widths = [heads * size for heads, size in zip(self.qkv_heads, sizes, strict=True)]
        self.input_gate_width = self.qkv_widths[2] if options.input_gate else 0
        self.gate_width = self.heads * value_dim if options.output_gate else 0
        self.gate_activation = options.output_gate if isinstance(options.output_gate, str) else "silu"
        self.in_proj = StackedLinear(width, [*self.qkv_widths, self.input_gate_width, self.gate_width])
        self.convolution = ShortConvolution(sum(self.qkv_widths), options.convolution) if options.convolution else None
        self.convolution_silu = options.convolution_activation == "silu" and self.convolution is not None
        self.query_norm = self.key_norm = None
        self.norms_together = options.query_key_norm == "all"
        if about.has_keys and options.query_key_norm != "none":
            query_size, key_size = self.qkv_widths[:2] if self.norms_together else [head_dim, head_dim]
            self.query_norm, self.key_norm = block_norm(options, query_size), block_norm(options, key_size)
        self.attention = CAUSAL[kind](self.heads, head_dim, value_dim, options.attention)
        self.grouped = self.attention.group_heads(kv_heads) and not key_heads
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
        self.head_norm = None
        if options.head_norm and self.attention.normalizes_heads:
            gains = (value_dim,) if options.head_norm == "shared" else (self.heads, value_dim)
            self.head_norm = RMSNorm(*gains, epsilon=options.head_norm_epsilon or options.norm_epsilon)
        self.out_proj = Linear(self.heads * value_dim, width)

    def init_recall(self) -> None:
        """Initialize keys as the queries of the previous token, and both as codes of the last tokens, if the attention
        `starts_with_recall`."""
        if self.attention.starts_with_recall and self.convolution is not None and self.convolution.width > 1:
            begin, size, _ = self.qkv_widths
            queries, keys = slice(begin), slice(begin, begin + size)
            # the first of the query heads that share a key head
            keys_of = self.qkv_heads[1]
            first = torch.arange(begin).unflatten(0, (keys_of, -1, size // keys_of))[:, 0].flatten()
            self.in_proj.weight[keys] = self.in_proj.weight[queries][first]
            self.convolution.init_codes(queries, keys, first)

    def init_state(self, batch: int, device: torch.device, dtype: torch.dtype, is_wanted: bool = True) -> BlockState:
        tail = self.convolution.init_state(batch, device, dtype) if self.convolution else None
        has_state = is_wanted or not self.attention.reads_alone
        return BlockState(self.attention.init_state(batch, device, dtype) if has_state else None, tail)

    def forward(self, x: Tensor, state: BlockState, stretch: Stretch) -> tuple[Tensor, BlockState]:
        x = x if self.norm_after else self.norm(x, for_product=True)
        widths = sum(self.qkv_widths), self.input_gate_width, self.gate_width
        qkv, input_gate, gate = self.in_proj(x).split(widths, dim=-1)
        tail = state.tail
        if self.input_gate_width:
            qk, v = qkv.split([sum(self.qkv_widths[:2]), self.qkv_widths[2]], dim=-1)
            qkv = torch.cat([qk, v * input_gate], dim=-1) if qk.shape[-1] else v * input_gate
        if self.convolution is not None and tail is not None:
            if stretch.part is not None:
                tail, qkv = stretch.part.tail(tail, qkv)
            qkv, tail = self.convolution(qkv, tail, stretch.in_document, stretch.document_starts)
            qkv = silu(qkv) if self.convolution_silu else qkv
        q, k, v = self.split_heads(qkv)
        inputs = self.attention_inputs(x, q, k, stretch)
        if self.uses_rope:
            q, k = (apply_rope(part, stretch.in_document, self.rope) for part in (q, k))
        attention, starts = state.attention, stretch.document_starts
        if stretch.part is not None:
            attention, v = stretch.part.attention_state(self.attention, attention, k, v, starts, inputs)
        if attention is None:
            y = self.attention.outputs(q, k, v, starts, inputs)
        else:
            y, attention = self.attention(q, k, v, attention, starts, inputs)
        y = self.out_proj(self.gated(y.transpose(1, 2), gate))
        return self.norm(y) if self.norm_after else y, BlockState(attention, tail)

    def gated(self, y: Tensor, gate: Tensor) -> Tensor:
        """Return the outputs of the heads (B, T, H, V), normed and multiplied by their gate, as (B, T, H V)."""
        if self.head_norm is not None and self.gate_width and self.gate_activation == "silu":
            return self.head_norm(y, gate.view_as(y), for_product=True).flatten(2)
        y = (y if self.head_norm is None else self.head_norm(y)).flatten(2)
        return y * GATES[self.gate_activation](gate) if self.gate_width else y

    def split_heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v (B, H, T, D) from their concatenated channels (B, T, C)."""
        parts = list(qkv.split(self.qkv_widths, dim=-1))
        norms = self.query_norm, self.key_norm, None
        for number, (norm, heads) in enumerate(zip(norms, self.qkv_heads, strict=True)):
            part = parts[number]
            part = norm(part) if norm is not None and self.norms_together else part
            part = part.unflatten(-1, (heads, part.shape[-1] // heads))
            part = norm(part) if norm is not None and not self.norms_together else part
            parts[number] = part.transpose(1, 2)
        q, k, v = (self.repeated(part) for part in parts)
        return q, k, v

    def repeated(self, part: Tensor) -> Tensor:
        """Return queries, keys or values (B, G, T, D) for each head, unless the attention takes those of groups."""
        heads = part.shape[1]
        return part if heads == self.heads or self.grouped else part.repeat_interleave(self.heads // heads, dim=1)

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
        super().__init__(options.of_kind(kind), Mixer(options.of_kind(kind), kind))
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
