"""Options of the model: its size, and how its tokens look at the past."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from lmlong.recipe.section import Options, mistake

AttentionKind = Literal["linear", "window", "softmax"]


class Taylor(Options):
    """The second-order features of feature_map: taylor."""

    width: int = Field(16, gt=0)
    """Width r of the projection of queries and keys; it makes 1 + r + r (r + 1) / 2 features."""


class Favor(Options):
    """The random features of feature_map: favor."""

    features: int | None = Field(None, gt=0)
    """Features of a head; left out, twice the head width."""
    form: Literal["positive", "hyperbolic"] = "positive"
    """positive, or hyperbolic: each random row used with both signs, so half as many are drawn."""
    norms: Literal["chi", "fixed", "quantile"] = "chi"
    """Lengths of the random rows: chi as sampled (unbiased), fixed at sqrt(width), or spread over the quantiles."""
    redraw_every: int | None = Field(None, gt=0)
    """Training steps between new draws; left out, the first draw stays."""

    @model_validator(mode="after")
    def check(self) -> "Favor":
        if self.form == "hyperbolic" and (self.features or 0) % 2:
            raise mistake("features", f"{self.features} is odd; hyperbolic features come in pairs.")
        return self


class Attention(Options):
    """How tokens look at the past. Options that a kind does not have are left unread by it."""

    kind: AttentionKind | Annotated[list[AttentionKind], Field(min_length=1)] = "linear"
    """linear (constant state), window (exact over the last tokens, constant state) or softmax (exact, growing state);
    a list is a pattern repeated over the layers."""
    feature_map: Literal["elu", "relu", "cosine", "softmax", "taylor", "favor"] = "elu"
    """linear: the map that replaces softmax's exponential, kept non-negative."""
    decay: Literal["none", "fixed", "learned"] = "learned"
    """linear: forget nothing, at a fixed rate a head, or by a gate learned from the token."""
    window: int = Field(256, gt=0)
    """window: how many tokens are seen, the token itself among them."""
    taylor: Taylor = Taylor()
    favor: Favor = Favor()


class Downsample(Options):
    """The layers in the middle work on a shorter sequence: blocks of tokens, counted from a document's start, each
    pooled into one vector."""

    factor: int = Field(4, gt=1, le=64)
    """Tokens of a block; text.sequence_length must be a multiple of it."""
    kind: Literal["mean", "max", "conv"] = "mean"
    """How a block becomes one vector: mean or max of each channel, or a learned convolution of its tokens."""
    layers: int | None = Field(None, gt=0)
    """How many of model.layers, those in the middle, run shortened; left out, all but the first and the last."""


class Model(Options):
    """The language model: embedding, blocks, tied output."""

    width: int = Field(256, gt=0)
    """Size of the vector that stands for a token between blocks."""
    layers: int = Field(6, gt=0)
    """Number of blocks."""
    heads: int = Field(4, gt=0)
    """Attention heads in each block; they share the width."""
    attention: Attention = Attention()
    convolution: int = Field(4, ge=0, le=64)
    """Tokens seen by the causal convolution over queries, keys and values; 0 leaves it out."""
    positions: Literal["auto", "none", "rotary"] = "auto"
    """rotary turns queries and keys by their place in the document; auto does so for softmax, window, cosine, favor."""
    mlp_ratio: float = Field(2.7, gt=0)
    """Inner width of the SwiGLU as a multiple of the width (rounded up to a multiple of 32)."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Share of the activations dropped on the way into the residual stream while training."""
    downsample: Downsample | None = None
    """Layers in the middle that work on a shortened sequence; left out, all layers work on every token."""

    @property
    def factor(self) -> int:
        """Tokens to which documents are padded, so that the blocks of a batch begin and end together."""
        return self.downsample.factor if self.downsample else 1

    @property
    def shortened(self) -> range:
        """The layers that run on a shortened sequence."""
        if self.downsample is None:
            return range(0)
        count = self.layers - 2 if self.downsample.layers is None else self.downsample.layers
        first = (self.layers - count) // 2
        return range(first, first + count)

    @model_validator(mode="after")
    def check(self) -> "Model":
        if self.width % self.heads:
            raise mistake("heads", f"{self.heads} heads do not divide a width of {self.width}.")
        if (self.width // self.heads) % 2 and self.positions != "none":
            raise mistake(
                "heads", f"a head width of {self.width // self.heads} is odd; rotary positions need an even one."
            )
        if self.downsample and self.layers == 1:
            raise mistake("downsample", "a model of one layer has no middle. Leave downsample out.")
        if self.downsample and not 0 < len(self.shortened) < self.layers:
            wanted = self.downsample.layers or "all but the first and the last"
            left = "at full length" if self.shortened else "shortened"
            raise mistake(
                "downsample.layers",
                f"{wanted} of {self.layers} layers leaves none {left}. Give 1 to {self.layers - 1}.",
            )
        return self
