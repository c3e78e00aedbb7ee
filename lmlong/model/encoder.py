"""The encoder: embedding, bidirectional blocks, logits of the masked tokens.

B batch, T time, H heads, D head dim, V vocabulary.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, silu
from torch.utils.checkpoint import checkpoint

from lmlong import recipe
from lmlong.attention.encoder.base import EncoderAttention
from lmlong.attention.registry import ENCODER
from lmlong.model.base import EMBEDDING_STD, LMHead, TextModel
from lmlong.model.hourglass import EncoderHourglass
from lmlong.model.layers import RMSNorm, StackedLinear, SwiGLU
from lmlong.model.loss import summed_nll, token_nll
from lmlong.model.rope import apply_rope, sinusoidal_positions


class EncoderMixer(nn.Module):
    """Gated bidirectional attention."""

    def __init__(self, options: recipe.Model, attention: EncoderAttention):
        super().__init__()
        width, self.heads = options.width, options.heads
        self.norm = RMSNorm(width, epsilon=options.norm_epsilon)
        self.in_proj = StackedLinear(width, 4 * [width])  # queries, keys, values, output gate
        self.attention = attention
        # Without positions a text would be a bag of words to most attentions. Rotated keys keep theirs even where a
        # slot or a sum mixes them before a query comes; small encoders of every kind learned sooner with them than
        # with positions added to the tokens.
        self.uses_rope = options.positions in ("auto", "rotary")
        self.rope = options.rope
        self.head_norm = RMSNorm(self.heads, width // self.heads, epsilon=options.norm_epsilon)
        self.out_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, padding: Tensor | None) -> Tensor:
        q, k, v, gate = self.project(x)
        y = self.head_norm(self.attention(q, k, v, padding).transpose(1, 2)).flatten(2)
        return self.out_proj(y * silu(gate))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return queries, keys and values (B, H, T, D), the inputs of the attention, and the gate (B, T, width)."""
        *qkv, gate = self.in_proj(self.norm(x)).chunk(4, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in qkv)
        if self.uses_rope:
            index = torch.arange(x.shape[1], device=x.device)[None]
            q, k = (apply_rope(part, index, self.rope) for part in (q, k))
        return q, k, v, gate


class EncoderBlock(nn.Module):
    """x + mixer(x), then x + mlp(x)."""

    def __init__(self, options: recipe.Model, attention: EncoderAttention):
        super().__init__()
        self.mixer = EncoderMixer(options, attention)
        self.mlp = SwiGLU(options)
        self.dropout = options.dropout

    def forward(self, x: Tensor, padding: Tensor | None) -> Tensor:
        x = x + dropout(self.mixer(x, padding), self.dropout, self.training)
        return x + dropout(self.mlp(x), self.dropout, self.training)


class MaskedLMHead(LMHead):
    """The output layer for all tokens but the last, the mask token, which is never a target."""

    def forward(self, function: Callable[..., Tensor], hidden: Tensor, *others: Tensor) -> Tensor:
        return function(hidden, self.tied[0].weight[:-1], *others)


class Encoder(TextModel):
    """A model that predicts masked tokens from both sides; the mask of a batch is its padding, true where no token is.

    The id of the mask token follows the last of the vocabulary.
    """

    blocks: Sequence[EncoderBlock]

    def __init__(self, options: recipe.Model, vocabulary: int, longest: int, activation_checkpointing: bool = False):
        super().__init__()
        self.activation_checkpointing = activation_checkpointing
        self.mask_token = vocabulary
        self.embedding = nn.Embedding(vocabulary + 1, options.width)
        blocks = (EncoderBlock(options, attention) for attention in _attentions(options, longest))
        self.blocks = nn.ModuleList(blocks)  # type: ignore[assignment]
        self.downsampled_layers = options.downsampled_layers
        shortened = options.downsample
        self.hourglass = EncoderHourglass(options.width, shortened, options.norm_epsilon) if shortened else None
        self.sinusoidal = options.positions == "absolute"
        self.norm = RMSNorm(options.width, epsilon=options.norm_epsilon)
        self.lm_head = MaskedLMHead(self.embedding)
        self._compiled_run: Callable[..., Tensor] | None = None
        self.init_weights()

    def init_state(self, batch: int) -> None:
        """Return None: an encoder reads its text at once."""

    def forward(self, tokens: Tensor, padding: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Return logits (B, T, V) of tokens (B, T); a padded row has the logits that it has alone."""
        return self.logits(self.hidden_states(tokens, padding))

    def hidden_states(self, tokens: Tensor, padding: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Return the last hidden states (B, T, width)."""
        return (self._compiled_run or self._run)(tokens, padding)

    def loss(
        self,
        tokens: Tensor,
        targets: Tensor,
        mask: Tensor | None = None,
        state: Any = None,
        segment: int | None = None,
    ) -> tuple[Tensor, None]:
        assert segment is None and state is None
        return self.lm_head(summed_nll, self.hidden_states(tokens, mask), targets), None

    @torch.no_grad()
    def token_nll(
        self, tokens: Tensor, targets: Tensor, mask: Tensor | None = None, state: Any = None
    ) -> tuple[Tensor, None]:
        assert state is None
        return self.lm_head(token_nll, self.hidden_states(tokens, mask), targets), None

    def _run(self, tokens: Tensor, padding: Tensor | None) -> Tensor:
        x = self.embedding(tokens)
        if self.sinusoidal:
            # as large as an embedding begins: at full size they would drown the tokens and delay learning for long
            waves = sinusoidal_positions(tokens.shape[1], x.shape[2], x.device).to(x.dtype).to(x.device)
            x = x + EMBEDDING_STD * 2**0.5 * waves
        # scaled to about 1, else the first blocks would drown it; the logits need it small
        x = x * self.embedding.embedding_dim**0.5
        if self.hourglass is None:
            return self.norm(self._run_layers(range(len(self.blocks)), x, padding))
        x = self._run_layers(range(self.downsampled_layers.start), x, padding)
        x = self.hourglass(x, padding, partial(self._run_layers, self.downsampled_layers))
        return self.norm(self._run_layers(range(self.downsampled_layers.stop, len(self.blocks)), x, padding))

    def _run_layers(self, layers: range, x: Tensor, padding: Tensor | None) -> Tensor:
        for layer in layers:
            block = self.blocks[layer]
            if self.activation_checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, padding, use_reentrant=False)
            else:
                x = block(x, padding)
        return x

    def compile_blocks(self) -> None:
        self._compiled_run = torch.compile(self._run)


def _attentions(options: recipe.Model, longest: int) -> list[EncoderAttention]:
    """Return the attention of each layer; those of a kind are made together, since they may share matrices."""
    kinds, head_dim = options.kinds, options.width // options.heads
    made = {
        kind: iter(ENCODER[kind](options.layer_lengths(kind, longest), options.heads, head_dim, options.attention))
        for kind in dict.fromkeys(kinds)
    }
    return [next(made[kind]) for kind in kinds]
