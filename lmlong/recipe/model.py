"""Options of the model: its size and what its blocks do."""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from lmlong.recipe import bounds
from lmlong.recipe.attention import Attention
from lmlong.recipe.kinds import ATTENTION_KINDS, FEATURE_MAP_KINDS
from lmlong.recipe.section import Options, completed, mistake


class Downsample(Options):
    """The layers in the middle work on a shorter sequence: blocks of tokens, counted from a document's start, or for an
    encoder from that of the sequence, each pooled into one vector."""

    factor: int = Field(default=4, gt=1, le=64)
    """Tokens of a block; a causal model's text.sequence_length must be a multiple of it."""
    kind: Literal["mean", "max", "conv"] = "mean"
    """How a block becomes one vector: mean or max of each channel, or a learned convolution of its tokens."""
    layers: int | None = Field(default=None, gt=0, le=10_000)
    """How many of model.layers, those in the middle, run shortened; left out, all but the first and the last."""


DOWNSAMPLE_DEFAULTS: dict[str, Any] = {"attention": {"kind": "linear"}}
"""Defaults with downsampled layers, which have no tokens to look up."""


class RopeScaling(Options):
    """Llama 3's way to let rotary positions reach further than the length that a model was trained at."""

    factor: float = Field(default=8.0, gt=1, le=1e6)
    """By how much the slow rotations are slowed down."""
    low_frequency_factor: float = Field(default=1.0, gt=0, le=1e6)
    """Rotations of fewer turns than this within the original length are slowed down by the whole factor."""
    high_frequency_factor: float = Field(default=4.0, gt=0, le=1e6)
    """Rotations of more turns than this stay as they are; between both the factor falls."""
    original_length: int = Field(default=8192, gt=0, le=bounds.TOKENS)
    """Tokens of a sequence before scaling."""

    def disagreements(self) -> Iterator[PydanticCustomError]:
        if self.high_frequency_factor <= self.low_frequency_factor:
            yield mistake(
                "high_frequency_factor",
                f"{self.high_frequency_factor:g} is not above low_frequency_factor, {self.low_frequency_factor:g}.",
            )


class Rope(Options):
    """Rotary positions: how fast they turn."""

    base: float = Field(default=10_000.0, gt=1, le=1e12)
    """Pair i of a head's d / 2 turns by base^(-2i/d) radians a token."""
    scaling: RopeScaling | None = None
    """Slower turns for long texts, as in Llama 3; left out, none."""


class HeadDims(NamedTuple):
    """The sizes of a head's vectors."""

    key: int  # of its queries too
    value: int


class Model(Options):
    """The model: embedding, blocks, output."""

    width: int = Field(default=256, gt=0, le=bounds.WIDTH)
    """Size of the vector that stands for a token between blocks."""
    layers: int = Field(default=6, gt=0, le=10_000)
    """Number of blocks."""
    heads: int = Field(default=4, gt=0, le=bounds.WIDTH)
    """Attention heads in each block."""
    kv_heads: int | None = Field(default=None, gt=0, le=bounds.WIDTH)
    """Heads of keys and values, each of which serves heads / kv_heads heads of queries, where an attention has keys;
    left out, as many as heads."""
    head_dim: int | None = Field(default=None, gt=0, le=bounds.WIDTH)
    """Size of a head's queries and keys; left out, the heads share the width. The state grows with it, and with the
    state what a model can recall. An encoder has no choice."""
    value_dim: int | None = Field(default=None, gt=0, le=bounds.WIDTH)
    """Size of a head's values; left out, that of its queries and keys. The state grows with it too."""
    attention: Attention = Attention()
    convolution: int = Field(default=4, ge=0, le=64)
    """Tokens seen by the causal convolution over queries, keys and values; 0 leaves it out, as an encoder does."""
    positions: Literal["auto", "none", "rotary", "absolute"] = "auto"
    """rotary rotates queries and keys by their position in the document (RoPE); auto does so for softmax, window,
    cosine, favor and in all encoders. absolute, for encoders only, adds sinusoidal positions to the embedding."""
    rope: Rope = Rope()
    output_gate: bool = True
    """Multiply what an attention puts out by a gate of each channel, learned from the token."""
    head_norm: bool = True
    """Bring the output of each head of an attention to a mean square of 1; delta, which is no mean, needs it."""
    norm_epsilon: float = Field(default=1e-6, gt=0, le=1)
    """What is added to the mean square in RMS norms."""
    embedding_scale: float | None = Field(default=None, gt=0, le=1e6)
    """What the embeddings of tokens are multiplied by; left out, the square root of the width."""
    tied_output: bool = True
    """Let the output layer have the weights of the embedding."""
    mlp_width: int | None = Field(default=None, gt=0, le=bounds.WIDTH)
    """Inner width of the SwiGLU; left out, it follows from mlp_ratio."""
    mlp_ratio: float = Field(default=2.7, gt=0, le=1024)
    """Inner width of the SwiGLU as a multiple of the width (rounded up to a multiple of 32)."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of the activations dropped on the way into the residual stream while training."""
    downsample: Downsample | None = None
    """Layers in the middle that work on a shortened sequence; left out, all layers work on every token."""

    @model_validator(mode="before")
    @classmethod
    def complete(cls, values: Any) -> Any:
        shortened = isinstance(values, dict) and values.get("downsample")
        return completed(values, DOWNSAMPLE_DEFAULTS) if shortened else values

    @property
    def head_dims(self) -> HeadDims:
        """The sizes of a head's queries and keys, and of its values."""
        keys = self.head_dim or self.width // self.heads
        return HeadDims(keys, self.value_dim or keys)

    @property
    def inner_width(self) -> int:
        """Inner width of the SwiGLU."""
        return self.mlp_width or max(-(-int(self.width * self.mlp_ratio) // 32), 1) * 32

    @property
    def factor(self) -> int:
        """Tokens in a block of the downsampled layers; 1 without downsampling."""
        return self.downsample.factor if self.downsample else 1

    @property
    def downsampled_layers(self) -> range:
        """The layers that run on a shortened sequence."""
        if self.downsample is None:
            return range(0)
        count = self.layers - 2 if self.downsample.layers is None else self.downsample.layers
        first = (self.layers - count) // 2
        return range(first, first + count)

    @property
    def state_growth(self) -> Literal["constant", "per token"]:
        """Whether the state of any layer grows with the tokens read."""
        return "per token" if self.growing_kinds else "constant"

    @property
    def growing_kinds(self) -> list[str]:
        """The attentions whose state grows with the tokens read."""
        return [kind for kind in dict.fromkeys(self.kinds) if ATTENTION_KINDS[kind].state_growth == "per token"]

    @property
    def quadratic(self) -> bool:
        """Whether any layer takes quadratic time in the tokens held at once."""
        return any(ATTENTION_KINDS[kind].quadratic for kind in self.kinds)

    @property
    def uses_rope(self) -> bool:
        """Whether queries and keys of any layer are rotated in a causal model."""
        if self.positions != "auto":
            return self.positions == "rotary"
        kinds = [ATTENTION_KINDS[kind] for kind in self.kinds]
        of_map = FEATURE_MAP_KINDS[self.attention.feature_map].uses_rope
        window = self.attention.parallel_window is not None
        return any(
            kind.uses_rope or (kind.uses_feature_map and of_map) or (kind.recurrent and window) for kind in kinds
        )

    @property
    def kinds(self) -> list[str]:
        """The attention of each layer: the pattern, repeated."""
        pattern = self.attention.kind_names
        return [pattern[layer % len(pattern)] for layer in range(self.layers)]

    def layer_lengths(self, kind: str, tokens: int) -> list[int]:
        """Return the input length of each layer of a kind in an encoder; the last block of tokens may be partial."""
        factors = [self.factor if layer in self.downsampled_layers else 1 for layer in range(self.layers)]
        return [-(-tokens // factor) for factor, each in zip(factors, self.kinds, strict=True) if each == kind]

    def disagreements(self) -> Iterator[PydanticCustomError]:
        if self.heads % (self.kv_heads or 1):
            yield mistake(
                "kv_heads", f"{self.kv_heads} do not divide {self.heads} heads. Use a divisor of model.heads."
            )
        if not self.head_norm and "delta" in self.kinds:
            yield mistake("head_norm", "the output of delta is no mean of values and needs it. Set it to true.")
        if self.head_dim is None and self.width % self.heads:
            why = f"{self.heads} heads do not divide a width of {self.width}. Use a divisor, or give model.head_dim."
            yield mistake("heads", why)
        if self.downsample and self.layers == 1:
            yield mistake("downsample", "a model of one layer has no middle. Leave downsample out.")
        elif self.downsample and not 0 < len(self.downsampled_layers) < self.layers:
            layers = self.downsample.layers or "all but the first and the last"
            left = "at full length" if self.downsampled_layers else "downsampled"
            yield mistake(
                "downsample.layers",
                f"{layers} of {self.layers} layers leaves none {left}. Give 1 to {self.layers - 1}.",
            )
        else:
            yield from self._downsampled_tokens()

    def _downsampled_tokens(self) -> Iterator[PydanticCustomError]:
        """Iterate over the mistake that a downsampled layer is of a kind that reads tokens."""
        kinds = self.kinds
        wrong = [layer for layer in self.downsampled_layers if ATTENTION_KINDS[kinds[layer]].reads_tokens]
        for layer in wrong[:1]:
            yield mistake(
                "attention.kind",
                f"{kinds[layer]} reads tokens, and layer {layer + 1}, which is downsampled, has none. Let layers in "
                "the middle be of another kind, or leave downsample out.",
            )
