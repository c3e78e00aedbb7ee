"""The causal language model: embedding, blocks, logits; it prefills in parallel and decodes token by token.

B batch, T time, V vocabulary.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lmlong import recipe
from lmlong.attention.base import CausalAttention
from lmlong.attention.device_policy import FollowsPolicy
from lmlong.attention.inputs import LastTokens, last_tokens
from lmlong.attention.products import dtype_of_product
from lmlong.attention.state_check import StateError, check_alike, check_range
from lmlong.errors import UsageError
from lmlong.model.base import LMHead, TextModel
from lmlong.model.block import Block, BlockState, Mixer, with_states
from lmlong.model.hourglass import Hourglass, HourglassState
from lmlong.model.layers import block_norm
from lmlong.model.learning.state import Learned
from lmlong.model.ngram_embedding import NgramEmbedding
from lmlong.model.rope import document_positions
from lmlong.model.sequence_group import SequencePart
from lmlong.model.stretch import BlockPhase, Stretch, any_phase, block_phase

PIECE = 4096
"""Tokens of each row scored at once, or more on a GPU (`LanguageModel.piece`). A longer text is scored piece by piece
from the state of the previous piece, in constant memory."""

CACHE_DTYPE = torch.bfloat16
"""The dtype in which a model that is loaded to read and write text caches keys and values."""

MOST_TOKENS = 1 << 53
"""Maximum number of tokens in a text: float64 represents every position up to it exactly."""


class ModelState(NamedTuple):
    """The state of the model after the tokens so far."""

    blocks: tuple[BlockState, ...]
    position: Tensor  # (B,) tokens of the current document so far
    hourglass: HourglassState | None = None  # None if no layers are downsampled
    last_tokens: Tensor | None = None  # (B, P) the last tokens that attentions and tables need; None if none needs them
    learned: Learned | None = None  # from the text (model/learning/read.py); None if nothing learns from it


class LanguageModel(TextModel):
    """A model that predicts the next token from its state. The mask of a batch is its document starts."""

    blocks: Sequence[Block]
    kernel_is_set = False
    """Whether `use_kernel` has set the kernel, which `kernel: auto` then leaves alone."""

    def __init__(
        self,
        options: recipe.Model,
        vocabulary: int,
        activation_checkpointing: bool = False,
        labels: int | None = None,
    ):
        super().__init__(options, vocabulary, activation_checkpointing)
        self.labels = labels
        self.kinds = options.mixer_kinds  # of the attention of each mixer, in the recipe
        layers = (Block(options, kind, layer in options.add_ngram) for layer, kind in enumerate(options.kinds, 1))
        self.blocks = nn.ModuleList(layers)  # type: ignore[assignment]
        self.hourglass = Hourglass(options) if options.downsample else None
        tables = options.ngram_embedding
        self.ngram_embedding = None if tables is None else NgramEmbedding(tables, options.width)
        self.past_tokens = self._count_past_tokens()
        self.norm = block_norm(options)
        is_tied, outputs = options.tied_output and labels is None, vocabulary if labels is None else labels
        self.lm_head = LMHead(self.embedding if is_tied else nn.Embedding(outputs, options.width))
        self.engine: Any = None
        """What continues texts with the model (decode/engine.py); None for torch."""
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        super().init_weights()
        for mixer in self.mixers:
            mixer.init_recall()

    def init_state(self, batch: int, is_wanted: bool = True) -> ModelState:
        like = self.embedding.weight.device, self.embedding.weight.dtype
        blocks = tuple(mixer.init_state(batch, *like, is_wanted) for mixer in self.mixers)
        position = torch.zeros(batch, dtype=torch.long, device=self.embedding.weight.device)
        hourglass = self.hourglass.init_state(batch, *like) if self.hourglass else None
        past = None if self.past_tokens is None else position.new_zeros(batch, self.past_tokens)
        return ModelState(blocks, position, hourglass, past)

    def forward(
        self,
        tokens: Tensor,
        state: ModelState | None = None,
        document_starts: Tensor | None = None,
        part: SequencePart | None = None,
        phase: BlockPhase | None = None,
        wants_state: bool = True,
    ) -> tuple[Tensor, ModelState]:
        """Return the last hidden state (B, T, width) after each of `tokens` (B, T), and the state after the last. If
        the tokens are a part of longer rows, the states of the layers are those before the rows. Without a state
        before, and unless `wants_state`, the state after is not complete: large tables are then never made."""
        state = self.init_state(len(tokens), wants_state) if state is None else state
        assert state.learned is None, "lmlong.model.learning.read reads with a state that learns"
        phase = phase or self.block_phase(state, document_starts, tokens.shape[1])
        x, stretch = self.embed(tokens, state, document_starts)
        stretch = stretch._replace(part=part, phase=phase)
        blocks, hourglass, middle = list[BlockState](), None, self.downsampled_layers
        call = self.call_for(tokens.shape[1])
        for layer, (block, own) in enumerate(with_states(self.blocks, state.blocks)):
            if layer not in middle:
                x, after = call(block, x, own, stretch)
                blocks += after
            elif layer == middle.start:  # the hourglass runs the layers in the middle, together
                assert self.hourglass is not None and state.hourglass is not None
                inner, states = (each[middle.start : middle.stop] for each in (list(self.blocks), state.blocks))
                x, hourglass, after = self.hourglass(x, state.hourglass, stretch, inner, states, self.call_for)
                blocks += after
        past = state.last_tokens
        if past is not None:
            past = torch.cat([past, tokens], dim=1)[:, tokens.shape[1] :].clone()  # a view would keep all tokens alive
        return self.norm(x), ModelState(tuple(blocks), stretch.in_document[:, -1] + 1, hourglass, past)

    def step(self, token: Tensor, state: ModelState) -> tuple[Tensor, ModelState]:
        """Return logits (B, V) of the token after `token` (B,), and the state after it, by torch."""
        logits, _, after = self.decode_step(token, state)
        return logits, after

    def decode_step(
        self, token: Tensor, state: ModelState, phase: BlockPhase | None = None
    ) -> tuple[Tensor, Tensor, ModelState]:
        """Return the logits and the last hidden state after `token`, and the state. Given the phase of a model with
        downsampling, this never synchronizes with the device, so it can be a CUDA graph."""
        hidden, after = self(token[:, None], state, phase=phase)
        return self.logits(hidden)[:, 0], hidden[:, 0], after

    def settle(self, state: ModelState) -> ModelState:
        """Return the state in the form that a prefill returns, if decode steps keep it in another form."""
        pairs = zip(self.attentions, state.blocks, strict=True)
        blocks = tuple(block._replace(attention=attention.settle(block.attention)) for attention, block in pairs)
        return state._replace(blocks=blocks)

    def check_state(self, state: ModelState, empty: ModelState) -> None:
        layers = zip(self.attentions, state.blocks, empty.blocks, strict=True)
        for layer, (attention, block, like) in enumerate(layers):
            try:
                attention.check_state(block.attention, like.attention)
            except StateError as error:
                raise error.inside(f"blocks.{layer}.attention") from None
            check_alike(block.tail, like.tail, name=f"blocks.{layer}.tail")
        for name in ("position", "hourglass", "last_tokens", "learned"):
            check_alike(getattr(state, name), getattr(empty, name), name=name)
        check_range("position", state.position, 0, MOST_TOKENS)
        if state.last_tokens is not None:
            check_range("last_tokens", state.last_tokens, 0, self.embedding.num_embeddings - 1)

    def embed(self, tokens: Tensor, state: ModelState, document_starts: Tensor | None) -> tuple[Tensor, Stretch]:
        """Return the scaled embeddings (B, T, width), and what all blocks need to know of the tokens."""
        index = document_positions(document_starts, state.position, tokens.shape[1])
        windows = None if state.last_tokens is None else last_tokens(tokens, state.last_tokens, index)
        x = self.embedding(tokens) * self.embedding_scale
        if self.ngram_embedding is not None:
            x = x + self.ngram_embedding(windows)
        return x.to(dtype_of_product(x)), Stretch(index, document_starts, windows)

    def _count_past_tokens(self) -> int | None:
        """Return how many tokens before the current one the attentions and tables need; None if none reads tokens."""
        counts = [
            (layer, declared.size - 1)
            for layer, attention in enumerate(self.attentions)
            for declared in attention.inputs.values()
            if isinstance(declared, LastTokens)
        ]
        if shortened := [layer for layer, _ in counts if layer in self.downsampled_layers]:
            raise UsageError(
                f"model.downsample: the attention of layer {shortened[0] + 1} reads tokens, but a downsampled layer "
                "reads blocks. Leave downsample out, or use another kind for the layers in the middle."
            )
        needed = [past for _, past in counts]
        if self.ngram_embedding is not None:
            needed.append(self.ngram_embedding.past_tokens)
        return max(needed, default=None)

    def layer_tokens(self, layer: int, tokens: int) -> int:
        """Return the number of vectors that a layer reads for `tokens` tokens of a document."""
        return tokens // self.hourglass.factor if self.hourglass and layer in self.downsampled_layers else tokens

    def block_phase(self, state: ModelState, document_starts: Tensor | None, time: int) -> BlockPhase | None:
        """Return the alignment of the next `time` tokens with blocks; None if no layers are downsampled."""
        if self.hourglass is None:
            return None
        if time > 1 and not self.policy_for(state.position).reads_values:
            return any_phase(self.hourglass.factor, time)
        return block_phase(self.hourglass.factor, state.position, document_starts, time)

    @contextmanager
    def whole_blocks(self) -> Iterator[None]:
        """Return a context for hooks that look at downsampled layers. There, on any device, these read all full blocks
        at once and nothing else; a GPU has to be waited for."""
        aligned: list[FollowsPolicy] = [self, *([self.hourglass] if self.hourglass else [])]
        policies = [module.policy for module in aligned]
        for module in aligned:
            module.policy = module.policy_for(self.embedding.weight)._replace(reads_values=True)
        try:
            yield
        finally:
            for module, policy in zip(aligned, policies, strict=True):
                module.policy = policy

    def piece(self, rows: int, least: int | None = None) -> int:
        """Return how many tokens of each row to read at once: `least`, by default PIECE, or more by the device
        policy."""
        policy, least = self.policy_for(self.embedding.weight), least or PIECE
        if not (self.constant_state or policy.block_sparse):  # softmax attention has a mask of all pairs
            return least
        return max(least, policy.piece_tokens // max(1, rows))

    def compile_blocks(self) -> None:
        super().compile_blocks()
        for attention in self.attention_parts:
            attention.is_compiled = True

    @property
    def mixers(self) -> list[Mixer]:
        """The mixers of all layers, in the order in which a token passes them."""
        return [mixer for block in self.blocks for mixer in block.mixers]

    @property
    def attentions(self) -> list[CausalAttention]:
        """The attention of each mixer."""
        return [mixer.attention for mixer in self.mixers]

    @property
    def attention_parts(self) -> list[CausalAttention]:
        """The attentions that the attentions of all mixers consist of."""
        return [part for attention in self.attentions for part in attention.parts]

    @property
    def constant_state(self) -> bool:
        """Whether the state of every mixer has a constant size."""
        return all(attention.state_growth == "constant" for attention in self.attentions)

    def set_state_dtype(self, dtype: torch.dtype) -> None:
        """Set the lowest precision of the sums in states."""
        for attention in self.attention_parts:
            attention.state_dtype = dtype

    def set_cache_dtype(self, dtype: torch.dtype | None) -> None:
        """Set the dtype in which new states cache keys and values; None for that in which they are computed."""
        for attention in self.attention_parts:
            attention.cache_dtype = dtype

    def use_kernel(self, name: str) -> None:
        """Set the kernel with which attentions compute many tokens: `torch`, `native`, `triton` or `fla`. Torch
        computes whatever the kernel cannot, and attentions without a kernel of that name. `auto` sets none."""
        if name != "auto":
            self.kernel_is_set = True
            self.use_kernels(dict.fromkeys(self.kinds, name))

    def use_kernels(self, names: Mapping[str, str]) -> None:
        """Set the kernels with which attentions compute many tokens, by their kinds in the recipe."""
        for kind, attentions in self.with_kernels.items():
            for attention in attentions:
                attention.use_kernel(names[kind])

    @property
    def with_kernels(self) -> dict[str, list[CausalAttention]]:
        """The attentions that have kernels, by their kinds."""
        attentions: dict[str, list[CausalAttention]] = {}
        for kind, attention in zip(self.kinds, self.attentions, strict=True):
            for part in attention.parts:
                if part.kernels:
                    attentions.setdefault(kind, []).append(part)
        return attentions
