"""The causal language model: embedding, blocks, logits; the same weights read in parallel and write token by token.

B batch, T time, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lmlong import recipe
from lmlong.attention.linear import LinearAttention
from lmlong.model.block import Block, BlockState, Norm, Place
from lmlong.model.convolution import ShortConvolution
from lmlong.model.loss import IGNORED, nats, scores, summed_nats
from lmlong.model.positions import places
from lmlong.model.products import Product, Rounded
from lmlong.model.segments import nats_by_checkpoints, nats_of_segments, split


class ModelState(NamedTuple):
    """All the model remembers of what it has read."""

    blocks: tuple[BlockState, ...]
    position: Tensor  # (B,) tokens read of the current document


class Output(nn.Module):
    """Holds vectors against the embeddings of all tokens, which it shares with the input."""

    def __init__(self, embedding: nn.Embedding):
        super().__init__()
        self.tied = (embedding,)  # in a tuple, so that its weights are not listed twice

    def forward(self, use: Callable[..., Tensor], hidden: Tensor, *others: Tensor) -> Tensor:
        return use(hidden, self.tied[0].weight, *others)


class RoundedOutput(nn.Module):
    """The same with a rounded copy of the embeddings."""

    def __init__(self, embedding: nn.Embedding, kept: torch.dtype):
        super().__init__()
        self.rounded = (Rounded(embedding.weight, kept),)  # in a tuple, for it is no more to learn

    def forward(self, use: Callable[..., Tensor], hidden: Tensor, *others: Tensor) -> Tensor:
        return use(hidden, self.rounded[0].whole(hidden.dtype), *others)


class LanguageModel(nn.Module):
    """Predicts the next token from a state that it carries along."""

    blocks: Sequence[Block]
    partitioned = False
    """Whether weights are whole only while their module is at work, as under DeepSpeed's stage 3."""

    def __init__(self, options: recipe.Model, vocabulary: int, activation_checkpointing: bool = False):
        super().__init__()
        self.activation_checkpointing = activation_checkpointing
        self.embedding = nn.Embedding(vocabulary, options.width)
        self.blocks = nn.ModuleList(Block(options, kind) for kind in kinds(options))  # type: ignore[assignment]
        self.norm = Norm(options.width)
        self.output: Output | RoundedOutput = Output(self.embedding)
        self._initialise()

    def init_state(self, batch: int) -> ModelState:
        weight = self.embedding.weight
        blocks = tuple(block.init_state(batch, weight.device, weight.dtype) for block in self.blocks)
        return ModelState(blocks, torch.zeros(batch, dtype=torch.long, device=weight.device))

    def read(
        self, tokens: Tensor, state: ModelState | None = None, starts: Tensor | None = None
    ) -> tuple[Tensor, ModelState]:
        """Continue from `state` over tokens (B, T): the vector (B, T, width) that predicts, and the state after."""
        state = self.init_state(len(tokens)) if state is None else state
        place = Place(places(starts, state.position, tokens.shape[1]), starts)
        # scaled to about 1, or the first blocks would drown what they are told; the logits want it small
        x = self.embedding(tokens) * self.embedding.embedding_dim**0.5
        after = []
        for block, before in zip(self.blocks, state.blocks, strict=True):
            if self.activation_checkpointing and torch.is_grad_enabled():
                x, block_state = checkpoint(block.prefill, x, before, place, use_reentrant=False)
            else:
                x, block_state = block.prefill(x, before, place)
            after.append(block_state)
        return self.norm(x), ModelState(tuple(after), place.positions[:, -1] + 1)

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., width) -> (..., V), in float32 at least."""
        return self.output(scores, hidden)

    def prefill(
        self, tokens: Tensor, state: ModelState | None = None, starts: Tensor | None = None
    ) -> tuple[Tensor, ModelState]:
        """Continue over tokens (B, T): logits (B, T, V) of what follows each, and the state after."""
        hidden, state = self.read(tokens, state, starts)
        return self.logits(hidden), state

    def step(self, token: Tensor, state: ModelState) -> tuple[Tensor, ModelState]:
        """Continue over one token (B,): logits (B, V) of the next, and the state after."""
        logits, state = self.prefill(token[:, None], state)
        return logits[:, 0], state

    def loss(
        self, tokens: Tensor, targets: Tensor, starts: Tensor | None = None, segment: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """The summed nats of the targets (B, T), read from an empty state, and how many were scored."""
        nats, _ = self.lose(tokens, targets, starts, segment, None)
        return nats, (targets != IGNORED).sum()

    def lose(
        self, tokens: Tensor, targets: Tensor, starts: Tensor | None, segment: int | None, state: ModelState | None
    ) -> tuple[Tensor, ModelState]:
        """The summed nats of the targets (B, T) read from `state`, and the state after.

        With `segment` the sequence is read in segments of so many tokens, and only the states between them are kept.
        """
        state = self.init_state(len(tokens)) if state is None else state
        if segment is None or not torch.is_grad_enabled():
            return self._summed(tokens, targets, starts, state)
        segments = split(segment, tokens, targets, starts)
        if self.partitioned:
            return nats_by_checkpoints(self._summed, segments, state)
        return nats_of_segments(self.read, self._summed, segments, state, list(self.parameters()))

    def _summed(
        self, tokens: Tensor, targets: Tensor, starts: Tensor | None, state: ModelState
    ) -> tuple[Tensor, ModelState]:
        """The summed nats of one segment, and the state after it."""
        hidden, state = self.read(tokens, state, starts)
        return self.output(summed_nats, hidden, targets), state

    def score(
        self, tokens: Tensor, targets: Tensor, state: ModelState | None = None, starts: Tensor | None = None
    ) -> tuple[Tensor, ModelState]:
        """The nats of each target (B, T), 0 where ignored, and the state after; for evaluation, without gradients."""
        hidden, state = self.read(tokens, state, starts)
        return self.output(nats, hidden, targets), state

    def sum_in(self, dtype: torch.dtype) -> None:
        """Keep the sums of linear attentions in this type at least."""
        for block in self.blocks:
            if isinstance(block.mixer.attention, LinearAttention):
                block.mixer.attention.sums = dtype

    def round_matrices(self, kept: torch.dtype) -> None:
        """Keep all matrices in bfloat16 or int8, less to fetch for each token; what is computed stays as precise."""
        for module in list(self.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, Product):
                    setattr(module, name, Rounded(child.weight, kept))
        self.output = RoundedOutput(self.embedding, kept)

    @torch.no_grad()
    def _initialise(self) -> None:
        """Normal weights of deviation width^-1/2; what enters the residual stream begins at 0, so depth is free."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.0 if name.endswith("project_out") else module.in_features**-0.5)
            elif isinstance(module, ShortConvolution):
                nn.init.normal_(module.weight, std=0.1)
                module.weight[:, -1] += 1  # it begins near to passing the token on as it is


def kinds(options: recipe.Model) -> list[str]:
    """The attention of each layer: the recipe's pattern, repeated."""
    kind = options.attention.kind
    pattern = [kind] if isinstance(kind, str) else kind
    return [pattern[layer % len(pattern)] for layer in range(options.layers)]


def parameters(model: nn.Module) -> int:
    """How many numbers are learned."""
    return sum(weight.numel() for weight in model.parameters())
