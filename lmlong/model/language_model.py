"""The causal language model: embedding, blocks, logits; the same weights read in parallel and write token by token.

B batch, T time, V vocabulary.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lmlong import recipe
from lmlong.attention.linear import LinearAttention
from lmlong.model.block import Block, BlockState, Norm, Place
from lmlong.model.convolution import ShortConvolution
from lmlong.model.downsample import Beat, Hourglass, HourglassState, beat_of
from lmlong.model.loss import IGNORED, nats, scores, summed_nats
from lmlong.model.positions import places
from lmlong.model.products import Product, Rounded
from lmlong.model.segments import nats_by_checkpoints, nats_of_segments, split


class ModelState(NamedTuple):
    """All the model remembers of what it has read."""

    blocks: tuple[BlockState, ...]
    position: Tensor  # (B,) tokens read of the current document
    hourglass: HourglassState | None = None  # of a model that shortens the sequence in the middle


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
        self.shortened = options.shortened  # the layers that the hourglass stands around
        self.hourglass = Hourglass(options.width, options.downsample) if options.downsample else None
        self.norm = Norm(options.width)
        self.output: Output | RoundedOutput = Output(self.embedding)
        self._initialise()

    def init_state(self, batch: int) -> ModelState:
        like = self.embedding.weight.device, self.embedding.weight.dtype
        blocks = tuple(block.init_state(batch, *like) for block in self.blocks)
        position = torch.zeros(batch, dtype=torch.long, device=self.embedding.weight.device)
        return ModelState(blocks, position, self.hourglass.init_state(batch, *like) if self.hourglass else None)

    def read(
        self, tokens: Tensor, state: ModelState | None = None, starts: Tensor | None = None
    ) -> tuple[Tensor, ModelState]:
        """Continue from `state` over tokens (B, T): the vector (B, T, width) that predicts, and the state after."""
        state = self.init_state(len(tokens)) if state is None else state
        return self.go_on(tokens, state, starts, self._beat(state, starts, tokens.shape[1]))

    def go_on(
        self, tokens: Tensor, state: ModelState, starts: Tensor | None, beat: Beat | None
    ) -> tuple[Tensor, ModelState]:
        """`read`, when it is known how the tokens fall into blocks: from here on nothing waits for a value."""
        place = Place(places(starts, state.position, tokens.shape[1]), starts)
        # scaled to about 1, or the first blocks would drown what they are told; the logits want it small
        x = self.embedding(tokens) * self.embedding.embedding_dim**0.5
        if self.hourglass is None or state.hourglass is None or beat is None:
            x, blocks, hourglass = *self._through(range(len(self.blocks)), x, state.blocks, place), None
        else:
            first, last = self.shortened.start, self.shortened.stop
            inner = partial(self._through, self.shortened)
            x, before = self._through(range(first), x, state.blocks[:first], place)
            x, hourglass, inside = self.hourglass.prefill(
                x, state.hourglass, state.blocks[first:last], place, beat, inner
            )
            x, after = self._through(range(last, len(self.blocks)), x, state.blocks[last:], place)
            blocks = before + inside + after
        return self.norm(x), ModelState(blocks, place.positions[:, -1] + 1, hourglass)

    def _through(
        self, layers: range, x: Tensor, states: tuple[BlockState, ...], place: Place
    ) -> tuple[Tensor, tuple[BlockState, ...]]:
        """The work of some of the layers, one after the other."""
        after = []
        for layer, before in zip(layers, states, strict=True):
            block = self.blocks[layer]
            if self.activation_checkpointing and torch.is_grad_enabled():
                x, state = checkpoint(block.prefill, x, before, place, use_reentrant=False)
            else:
                x, state = block.prefill(x, before, place)
            after.append(state)
        return x, tuple(after)

    def reads(self, layer: int, time: int) -> int:
        """How many vectors a layer reads of so many tokens of a document."""
        return time // self.hourglass.factor if self.hourglass and layer in self.shortened else time

    def _beat(self, state: ModelState, starts: Tensor | None, time: int) -> Beat | None:
        """How so many tokens fall into blocks, in a model that has them."""
        return beat_of(self.hourglass.factor, state.position, starts, time) if self.hourglass else None

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
        return self.answer(token, state, self._beat(state, None, 1))

    def answer(self, token: Tensor, state: ModelState, beat: Beat | None) -> tuple[Tensor, ModelState]:
        """`step`, when it is known how the token falls into blocks."""
        hidden, state = self.go_on(token[:, None], state, None, beat)
        return self.logits(hidden)[:, 0], state

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
