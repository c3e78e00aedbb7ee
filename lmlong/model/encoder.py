"""The encoder: embedding, bidirectional blocks, logits of the masked tokens or of labels.

B batch, T time, H heads, D head dim, V vocabulary.
"""

import sys
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d

from lmlong import recipe
from lmlong.attention.encoder.base import EncoderAttention
from lmlong.attention.registry import ENCODER
from lmlong.model.base import EMBEDDING_STD, LMHead, TextModel
from lmlong.model.block import ResidualBlock
from lmlong.model.hourglass import EncoderHourglass
from lmlong.model.layers import Linear, RMSNorm, StackedLinear, block_norm
from lmlong.model.loss import IGNORED
from lmlong.model.rope import apply_rope, sinusoidal_positions


class EncoderMixer(nn.Module):
    """Gated bidirectional attention, plus a depthwise convolution over the neighbours on both sides."""

    def __init__(self, options: recipe.Model, attention: EncoderAttention):
        super().__init__()
        width, self.heads = options.width, options.heads
        self.norm = block_norm(options)
        self.in_proj = StackedLinear(width, 4 * [width])  # queries, keys, values, output gate
        self.attention = attention
        # Without positions a text would be a bag of words to most attentions. Rotated keys keep their positions even
        # if a slot or a sum mixes them. Small encoders of every kind learned faster with rotary positions than with
        # positions added to the tokens.
        self.uses_rope = options.positions in ("auto", "rotary")
        self.rope = options.rope
        self.head_norm = RMSNorm(self.heads, width // self.heads, epsilon=options.norm_epsilon)
        self.out_proj = Linear(width, width)
        # Attention alone does not tell neighbours from distant tokens for hundreds of steps, and masked tokens are then
        # predicted no better than by their frequencies.
        taps = options.convolution
        self.convolution = nn.Parameter(torch.randn(width, 1, taps) * taps**-0.5) if taps else None

    def forward(self, x: Tensor, padding: Tensor | None) -> Tensor:
        x = self.norm(x, for_product=True)
        *qkv, gate = self.in_proj(x).chunk(4, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in qkv)
        if self.uses_rope:
            index = torch.arange(x.shape[1], device=x.device)[None]
            q, k = (apply_rope(part, index, self.rope) for part in (q, k))
        y = self.attention(q, k, v, padding).transpose(1, 2)
        y = self.out_proj(self.head_norm(y, gate.view_as(y), for_product=True).flatten(2))
        if self.convolution is None:
            return y
        x = x if padding is None else x.masked_fill(padding[..., None], 0)
        taps = self.convolution.shape[2]
        return y + conv1d(x.mT, self.convolution, padding=taps // 2, groups=x.shape[2]).mT[:, : x.shape[1]]


class EncoderBlock(ResidualBlock):
    """A block of the encoder."""

    mixer: EncoderMixer

    def __init__(self, options: recipe.Model, attention: EncoderAttention):
        super().__init__(options, EncoderMixer(options, attention))

    def forward(self, x: Tensor, padding: Tensor | None) -> Tensor:
        x = self.add(x, self.mixer(x, padding))
        return self.add(x, self.mlp(x))


class PooledNorm(nn.Module):
    """Centring and scaling of the means of rows by running statistics. These means differ by less than their common
    part: without this norm, steps change the logits of all rows together, and the differences are learned late."""

    mean: Tensor
    variance: Tensor
    steps: Tensor

    def __init__(self, width: int):
        super().__init__()
        for name, value in (("mean", torch.zeros(width)), ("variance", torch.ones(width)), ("steps", torch.zeros(1))):
            self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            rows, share = x.detach().flatten(0, -2).float(), (1 / (self.steps + 1)).clamp(min=0.1)
            self.mean.lerp_(rows.mean(0), share)
            self.variance.lerp_((rows - self.mean).square().mean(0), share)
            self.steps += 1
        return (x - self.mean) * (self.variance + 1e-5).rsqrt()


class Encoder(TextModel):
    """A model that predicts masked tokens, or the label of a row, from both sides. The mask of a batch is its padding,
    true for padded tokens.

    The id of the mask token is the size of the vocabulary.
    """

    blocks: Sequence[EncoderBlock]

    def __init__(
        self,
        options: recipe.Model,
        vocabulary: int,
        longest: int,
        activation_checkpointing: bool = False,
        labels: int | None = None,
    ):
        super().__init__(options, vocabulary + 1, activation_checkpointing)
        self.mask_token, self.longest, self.labels = vocabulary, longest, labels
        blocks = (EncoderBlock(options, attention) for attention in _attentions(options, longest))
        self.blocks = nn.ModuleList(blocks)  # type: ignore[assignment]
        self.hourglass = EncoderHourglass(options) if options.downsample else None
        self.sinusoidal = options.positions == "absolute"
        self.norm = block_norm(options)
        if labels is None:
            self.lm_head = LMHead(self.embedding, has_mask_token=True)
        else:
            self.lm_head = LMHead(nn.Embedding(labels, options.width))
            self.pooled_norm = PooledNorm(options.width)
            self.embedding_growth = torch.ones(1)
        self.init_weights()

    def init_state(self, batch: int) -> None:
        """Return None: an encoder reads the whole text at once."""

    def forward(self, tokens: Tensor, state: None = None, padding: Tensor | None = None) -> tuple[Tensor, None]:
        """Return the last hidden states (B, T, width), for labels their normed mean over the row. Padding does not
        change those of a row's tokens. An encoder has no state."""
        x = self.embedding(tokens)
        if self.sinusoidal:
            # scaled like an initial embedding: at full scale they would drown the tokens and delay learning
            waves = sinusoidal_positions(tokens.shape[1], x.shape[2], x.device).to(x.dtype).to(x.device)
            x = x + EMBEDDING_STD * 2**0.5 * waves
        x = x * self.embedding_scale
        first, end, blocks = self.downsampled_layers.start, self.downsampled_layers.stop, list(self.blocks)
        x = self._run_blocks(blocks[:first], x, padding)
        if self.hourglass is not None:
            y = self._run_blocks(blocks[first:end], *self.hourglass.downsample(x, padding))
            x = self.hourglass.upsample(x, y)
        hidden = self.norm(self._run_blocks(blocks[end:], x, padding))
        if self.labels is None:
            return hidden, None
        return self.pooled_norm(mean_of_rows(hidden, padding)).expand_as(hidden), None

    def loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        if self.policy_for(hidden).reads_values:  # most tokens are no targets, and their logits would take long
            scored = targets != IGNORED
            hidden, targets = hidden[scored], targets[scored]
        return super().loss(hidden, targets)

    def piece(self, rows: int) -> int:
        """Return a number that no text has: an encoder reads whole rows."""
        return sys.maxsize

    def _run_blocks(self, blocks: Sequence[EncoderBlock], x: Tensor, padding: Tensor | None) -> Tensor:
        call = self.call_for(x.shape[1])
        for block in blocks:
            x = call(block, x, padding)
        return x


def mean_of_rows(hidden: Tensor, padding: Tensor | None) -> Tensor:
    """Return the mean (B, 1, width) over the tokens of each row that are not padding."""
    if padding is None:
        return hidden.mean(1, keepdim=True)
    count = (~padding).sum(1, keepdim=True).clamp(min=1)
    return hidden.masked_fill(padding[..., None], 0).sum(1, keepdim=True) / count[..., None]


def _attentions(options: recipe.Model, longest: int) -> list[EncoderAttention]:
    """Return the attention of each layer. Attentions of one kind are built together, since they may share matrices."""
    kinds, head_dim = options.kinds, options.width // options.heads
    made = {
        kind: iter(ENCODER[kind](options.layer_lengths(kind, longest), options.heads, head_dim, options.attention))
        for kind in dict.fromkeys(kinds)
    }
    return [next(made[kind]) for kind in kinds]
