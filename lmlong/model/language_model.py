"""The causal language model: embedding, blocks, logits; the same weights read in parallel and write token by token.

B batch, T time, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lmlong import recipe
from lmlong.attention import chunked
from lmlong.attention.linear import LinearAttention
from lmlong.attention.native import engine
from lmlong.attention.spans import Attend
from lmlong.model.block import Block, BlockState, Norm, Place
from lmlong.model.downsample import Beat, Hourglass, HourglassState, beat_of
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
    hourglass: HourglassState | None = None  # of a model that shortens the sequence in the middle


class LanguageModel(TextModel):
    """Predicts the next token from a state that it carries along; a batch's marks are where documents start."""

    blocks: Sequence[Block]

    def __init__(self, options: recipe.Model, vocabulary: int, activation_checkpointing: bool = False):
        super().__init__()
        self.activation_checkpointing = activation_checkpointing
        self.embedding = nn.Embedding(vocabulary, options.width)
        self.blocks = nn.ModuleList(Block(options, kind) for kind in options.kinds)  # type: ignore[assignment]
        self.shortened = options.shortened  # the layers that the hourglass stands around
        self.hourglass = Hourglass(options.width, options.downsample) if options.downsample else None
        self.norm = Norm(options.width)
        self.output = Output(self.embedding)
        self.initialise()

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

    def fuse(self) -> None:
        for attention in self._linear():
            if attention.scan_by in (chunked.attend, engine.attend):
                # a loop over spans would be unrolled, to no gain, and native code cannot be seen through
                attention.scan_by = torch.compiler.disable(attention.scan_by)
        self.go_on = torch.compile(self.go_on)  # type: ignore[method-assign]

    def sum_in(self, dtype: torch.dtype) -> None:
        """Keep the sums of linear attentions in this type at least."""
        for attention in self._linear():
            attention.sums = dtype

    def scan_by(self, attend: Attend) -> None:
        """Let linear attentions read many tokens by this function, such as that of the kernels."""
        for attention in self._linear():
            attention.scan_by = attend

    def _linear(self) -> Iterator[LinearAttention]:
        attentions = (block.mixer.attention for block in self.blocks)
        return (attention for attention in attentions if isinstance(attention, LinearAttention))

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
