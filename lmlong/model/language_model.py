"""The causal language model: embedding, blocks, logits; the same weights read in parallel and write token by token.

B batch, T time, V vocabulary.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lmlong import recipe
from lmlong.attention.linear import LinearAttention
from lmlong.model.block import Block, BlockState, Norm, Place
from lmlong.model.loss import IGNORED, nats, summed_nats
from lmlong.model.positions import places
from lmlong.model.products import Product, Rounded
from lmlong.model.segments import nats_by_checkpoints, nats_of_segments, split
from lmlong.model.text_model import Output, RoundedOutput, TextModel

PIECE = 4096
"""Tokens scored at once; what is longer goes piece by piece along the state, in constant memory."""


class ModelState(NamedTuple):
    """All the model remembers of what it has read."""

    blocks: tuple[BlockState, ...]
    position: Tensor  # (B,) tokens read of the current document


class LanguageModel(TextModel):
    """Predicts the next token from a state that it carries along; a batch's marks are where documents start."""

    blocks: Sequence[Block]

    def __init__(self, options: recipe.Model, vocabulary: int, activation_checkpointing: bool = False):
        super().__init__()
        self.activation_checkpointing = activation_checkpointing
        self.embedding = nn.Embedding(vocabulary, options.width)
        self.blocks = nn.ModuleList(Block(options, kind) for kind in options.kinds)  # type: ignore[assignment]
        self.norm = Norm(options.width)
        self.output = Output(self.embedding)
        self.initialise()

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
        self, tokens: Tensor, targets: Tensor, marks: Tensor | None, segment: int | None, state: ModelState | None
    ) -> tuple[Tensor, ModelState]:
        """The summed nats of the targets (B, T) read from `state`, and the state after.

        With `segment` the sequence is read in segments of so many tokens, and only the states between them are kept.
        """
        state = self.init_state(len(tokens)) if state is None else state
        if segment is None or not torch.is_grad_enabled():
            return self._summed(tokens, targets, marks, state)
        segments = split(segment, tokens, targets, marks)
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

    @torch.no_grad()
    def nats(self, tokens: Tensor, targets: Tensor, marks: Tensor | None) -> Tensor:
        """The nats of each target (B, T), 0 where ignored, each row read from an empty state, however long it is."""
        state, lost = None, []
        for begin in range(0, tokens.shape[1], PIECE):
            of_piece = slice(begin, begin + PIECE)
            starts = None if marks is None else marks[:, of_piece]
            found, state = self.score(tokens[:, of_piece], targets[:, of_piece], state, starts)
            lost.append(found)
        return torch.cat(lost, dim=1)

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


def parameters(model: nn.Module) -> int:
    """How many numbers are learned."""
    return sum(weight.numel() for weight in model.parameters())
