"""The encoder: embedding, blocks that see all of a text, logits of the tokens that were hidden from it.

B batch, T time, H heads, V vocabulary.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, silu
from torch.utils.checkpoint import checkpoint

from lmlong import recipe
from lmlong.attention import ENCODER
from lmlong.attention.encoders import EncoderAttention
from lmlong.model.block import Norm, SwiGlu
from lmlong.model.funnel import Funnel
from lmlong.model.loss import nats, summed_nats
from lmlong.model.positions import rotate, waves
from lmlong.model.products import Product
from lmlong.model.text_model import EMBEDDED, Output, TextModel


class EncoderMixer(nn.Module):
    """Lets tokens look at all others: gated attention over queries, keys and values."""

    def __init__(self, options: recipe.Model, attention: EncoderAttention):
        super().__init__()
        width, self.heads = options.width, options.heads
        self.norm = Norm(width)
        self.project_in = Product(width, 4 * width)  # queries, keys, values, gate
        self.attention = attention
        # Without places a text would be a bag of words to most attentions. Turned keys tell theirs even where a slot or
        # a sum mixes them before a query comes; small encoders of every kind learned sooner so than with places added.
        self.rotary = options.positions in ("auto", "rotary")
        self.head_norm = Norm(self.heads, width // self.heads)
        self.project_out = Product(width, width)

    def forward(self, x: Tensor, padding: Tensor | None) -> Tensor:
        q, k, v, gate = self.project(x)
        y = self.head_norm(self.attention(q, k, v, padding).transpose(1, 2)).flatten(2)
        return self.project_out(y * silu(gate))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys and values (B, H, T, width of a head), as attention gets them, and the gate (B, T, width)."""
        *qkv, gate = self.project_in(self.norm(x)).chunk(4, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in qkv)
        if self.rotary:
            place = torch.arange(x.shape[1], device=x.device)[None]
            q, k = rotate(q, place), rotate(k, place)
        return q, k, v, gate


class EncoderBlock(nn.Module):
    """x + mixer(x), then x + mlp(x)."""

    def __init__(self, options: recipe.Model, attention: EncoderAttention):
        super().__init__()
        self.mixer = EncoderMixer(options, attention)
        self.mlp = SwiGlu(options)
        self.dropout = options.dropout

    def forward(self, x: Tensor, padding: Tensor | None) -> Tensor:
        x = x + dropout(self.mixer(x, padding), self.dropout, self.training)
        return x + dropout(self.mlp(x), self.dropout, self.training)


class OutputOfWords(Output):
    """All tokens but the last, the mask: no text holds it."""

    def forward(self, use: Callable[..., Tensor], hidden: Tensor, *others: Tensor) -> Tensor:
        return use(hidden, self.tied[0].weight[:-1], *others)


class Encoder(TextModel):
    """Finds out hidden tokens from those on both sides; a batch's marks are its padding, true where no token is.

    The mask that stands for a hidden token is the number after the last of the vocabulary.
    """

    blocks: Sequence[EncoderBlock]

    def __init__(self, options: recipe.Model, vocabulary: int, longest: int, activation_checkpointing: bool = False):
        super().__init__()
        self.activation_checkpointing = activation_checkpointing
        self.mask = vocabulary
        self.embedding = nn.Embedding(vocabulary + 1, options.width)
        blocks = (EncoderBlock(options, attention) for attention in _attentions(options, longest))
        self.blocks = nn.ModuleList(blocks)  # type: ignore[assignment]
        self.shortened = options.shortened  # the layers that the funnel stands around
        self.funnel = Funnel(options.width, options.downsample) if options.downsample else None
        self.waves = options.positions == "absolute"
        self.norm = Norm(options.width)
        self.output = OutputOfWords(self.embedding)
        self.initialise()

    def init_state(self, batch: int) -> None:
        """None: what it reads it reads at once."""

    def read(self, tokens: Tensor, padding: Tensor | None = None) -> Tensor:
        """The vector (B, T, width) that tells each token of (B, T); a padded row gives what it gives alone."""
        # scaled to about 1, or the first blocks would drown what they are told; the logits want it small
        x = self.embedding(tokens)
        if self.waves:
            # as large as a token begins: at their own size the tokens would drown, and nothing be learned for long
            x = x + EMBEDDED * 2**0.5 * waves(tokens.shape[1], x.shape[2], x.device).to(x.dtype)
        x = x * self.embedding.embedding_dim**0.5
        if self.funnel is None:
            return self.norm(self._through(range(len(self.blocks)), x, padding))
        x = self._through(range(self.shortened.start), x, padding)
        x = self.funnel(x, padding, partial(self._through, self.shortened))
        return self.norm(self._through(range(self.shortened.stop, len(self.blocks)), x, padding))

    def _through(self, layers: range, x: Tensor, padding: Tensor | None) -> Tensor:
        """The work of some of the layers, one after the other."""
        for layer in layers:
            block = self.blocks[layer]
            if self.activation_checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, padding, use_reentrant=False)
            else:
                x = block(x, padding)
        return x

    def lose(
        self,
        tokens: Tensor,
        targets: Tensor,
        marks: Tensor | None = None,
        segment: int | None = None,
        state: None = None,
    ) -> tuple[Tensor, None]:
        """The summed nats of the targets (B, T); no state is read or left, and nothing is read in segments."""
        assert segment is None and state is None
        return self.output(summed_nats, self.read(tokens, marks), targets), None

    @torch.no_grad()
    def nats(self, tokens: Tensor, targets: Tensor, marks: Tensor | None = None) -> Tensor:
        return self.output(nats, self.read(tokens, marks), targets)

    def fuse(self) -> None:
        self.read = torch.compile(self.read)  # type: ignore[method-assign]


def _attentions(options: recipe.Model, longest: int) -> list[EncoderAttention]:
    """Those of all layers; all of a kind are made together, since they may share matrices."""
    kinds, width = options.kinds, options.width // options.heads
    made = {
        kind: iter(ENCODER[kind](options.longest(kind, longest), options.heads, width, options.attention))
        for kind in dict.fromkeys(kinds)
    }
    return [next(made[kind]) for kind in kinds]
