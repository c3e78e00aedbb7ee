"""Options of the model: its size and what its blocks do."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from lmlong.recipe import bounds
from lmlong.recipe.attention import MAX_NGRAM, Attention, KindName
from lmlong.recipe.kinds import ATTENTION_KINDS, FEATURE_MAP_KINDS, rotating
from lmlong.recipe.section import Options, completed, mistake


class Downsample(Options):
    """The middle layers work on a shorter sequence: each block of tokens is pooled into one vector. Blocks are counted
    from the start of a document, or for an encoder from the start of the sequence."""

    factor: int = Field(default=4, gt=1, le=64)
    """Tokens in a block; text.sequence_length of a causal model must be a multiple of it."""
    kind: Literal["mean", "max", "conv"] = "mean"
    """How a block becomes one vector: mean or max of each channel, or a learned convolution (conv)."""
    layers: int | None = Field(default=None, gt=0, le=10_000)
    """Number of middle layers that run on the shortened sequence; left out, all but the first and the last."""


DOWNSAMPLE_DEFAULTS: dict[str, Any] = {"attention": {"kind": "linear"}}
"""Defaults with downsampling: downsampled layers have no token ids for ngram to look up."""


class NgramEmbedding(Options):
    """Tables of trained vectors, found by the hash of the last n tokens and added to the token's embedding. They learn
    which tokens follow which in all of the training text, at almost no arithmetic. Written {}, the defaults."""

    orders: list[Annotated[int, Field(gt=0, le=MAX_NGRAM)]] = Field(default=[2, 3], min_length=1)
    """n of each table: the last n tokens, including the current one. Each n is given once."""
    rows: int = Field(default=65_536, gt=0, le=2**28)
    """Vectors in each table; n-grams that hash to the same row share it. More rows take memory, but no time."""
    width: int = Field(default=64, gt=0, le=bounds.WIDTH)
    """Size of a vector, before it is projected to model.width."""

    def disagreements(self) -> Iterator[PydanticCustomError]:
        if len(set(self.orders)) < len(self.orders):
            yield mistake("orders", f"{self.orders} names an n twice. Give each n once.")


class RopeScaling(Options):
    """Llama 3's scaling of rotary positions, for texts longer than the model was trained on."""

    factor: float = Field(default=8.0, gt=1, le=1e6)
    """Factor by which slow rotations are slowed down."""
    low_frequency_factor: float = Field(default=1.0, gt=0, le=1e6)
    """Rotations with fewer turns than this within original_length are slowed down by the whole factor."""
    high_frequency_factor: float = Field(default=4.0, gt=0, le=1e6)
    """Rotations with more turns than this are unchanged; between the two limits the factor falls gradually."""
    original_length: int = Field(default=8192, gt=0, le=bounds.TOKENS)
    """Sequence length before scaling, in tokens."""

    def disagreements(self) -> Iterator[PydanticCustomError]:
        if self.high_frequency_factor <= self.low_frequency_factor:
            yield mistake(
                "high_frequency_factor",
                f"{self.high_frequency_factor:g} is not above low_frequency_factor, {self.low_frequency_factor:g}.",
            )


class Rope(Options):
    """Frequencies of rotary positions."""

    base: float = Field(default=10_000.0, gt=1, le=1e12)
    """Pair i of the d / 2 pairs of a head rotates by base^(-2i/d) radians per token."""
    share: float = Field(default=1.0, gt=0, le=1)
    """The share of a head's numbers that rotate, from the first one on; d is then their number, which must be even."""
    scaling: RopeScaling | None = None
    """Slower rotations for long texts, as in Llama 3; left out, none."""

    def rotated(self, head_dim: int) -> int:
        """Return how many numbers of a head rotate."""
        return int(head_dim * self.share)


OutputGate = bool | Literal["sigmoid", "identity"]
HeadNorm = bool | Literal["shared"]


class HeadDims(NamedTuple):
    """The sizes of a head's vectors."""

    key: int  # of its queries too
    value: int


class Mixer(Options):
    """Layers of one kind of attention whose heads differ from those of the model. What is left out is as in model."""

    kind: KindName
    """The kind of attention."""
    heads: int | None = Field(default=None, gt=0, le=bounds.WIDTH)
    """As model.heads."""
    kv_heads: int | None = Field(default=None, gt=0, le=bounds.WIDTH)
    """As model.kv_heads."""
    key_heads: int | None = Field(default=None, gt=0, le=bounds.WIDTH)
    """As model.key_heads."""
    head_dim: int | None = Field(default=None, gt=0, le=bounds.WIDTH)
    """As model.head_dim."""
    value_dim: int | None = Field(default=None, gt=0, le=bounds.WIDTH)
    """As model.value_dim."""
    convolution: int | None = Field(default=None, ge=0, le=64)
    """As model.convolution."""
    convolution_activation: Literal["none", "silu"] | None = None
    """As model.convolution_activation."""
    input_gate: bool | None = None
    """As model.input_gate."""
    query_key_norm: Literal["none", "head", "all"] | None = None
    """As model.query_key_norm."""
    positions: Literal["auto", "none", "rotary"] | None = None
    """As model.positions."""
    rope: Rope | None = None
    """As model.rope."""
    output_gate: OutputGate | None = None
    """As model.output_gate."""
    head_norm: HeadNorm | None = None
    """As model.head_norm."""
    head_norm_epsilon: float | None = Field(default=None, gt=0, le=1)
    """As model.head_norm_epsilon."""
    norm: Literal["before", "after"] | None = None
    """As model.norm."""


class Model(Options):
    """The model: embedding, blocks, output."""

    width: int = Field(default=256, gt=0, le=bounds.WIDTH)
    """Size of a token's vector between blocks."""
    layers: int = Field(default=6, gt=0, le=10_000)
    """Number of blocks."""
    heads: int = Field(default=4, gt=0, le=bounds.WIDTH)
    """Attention heads in each block."""
    kv_heads: int | None = Field(default=None, gt=0, le=bounds.WIDTH)
    """Key/value heads, for attentions that have keys. Each is shared by heads / kv_heads query heads. Left out, as many
    as heads."""
    key_heads: int | None = Field(default=None, gt=0, le=bounds.WIDTH)
    """Heads of queries and keys of linear and delta. Each is shared by heads / key_heads heads of values, each with a
    state and gates of its own. Left out, as many as heads."""
    head_dim: int | None = Field(default=None, gt=0, le=bounds.WIDTH)
    """Size of a head's queries and keys; left out, width / heads. A larger size gives a larger state, which can recall
    more. An encoder always uses width / heads."""
    value_dim: int | None = Field(default=None, gt=0, le=bounds.WIDTH)
    """Size of a head's values; left out, the size of its queries and keys. It enlarges the state too."""
    ngram_embedding: NgramEmbedding | None = None
    """Trained vectors of the last tokens, added to the embedding; left out, none."""
    attention: Attention = Attention()
    mixers: list[Mixer] = Field(default=[])
    """Kinds of attention with other heads than the rest, such as [{kind: softmax, heads: 8, kv_heads: 2}]."""
    add_ngram: list[Annotated[int, Field(gt=0, le=10_000)]] = Field(default=[])
    """Layers, counted from 1, that also get n-gram heads, after their attention of any kind and before the MLP. Their
    options are those of attention.ngram. They add nothing until they are trained, so a trained model can get them with
    training.init_from."""
    convolution: int = Field(default=4, ge=0, le=64)
    """Tokens seen by the causal convolution over queries, keys and values; 0 for none. That of an encoder sees both
    sides of a token, and is added to the output of attention."""
    convolution_activation: Literal["none", "silu"] = "none"
    """Function of the convolution's outputs: silu(x) = x sigmoid(x), or none."""
    input_gate: bool = False
    """Multiply each channel of the values, before the convolution, by a gate learned from the token."""
    query_key_norm: Literal["none", "head", "all"] = "none"
    """Scale queries and keys to a mean square of 1, with trained gains, before they are rotated: each head by itself,
    or all heads of a token together."""
    positions: Literal["auto", "none", "rotary", "absolute"] = Field(
        default="auto",
        description="rotary: queries and keys are rotated by their position in the document (RoPE). auto: rotary for "
        f"{', '.join(rotating())} and all encoders. absolute, for encoders only: sinusoidal positions are added to the "
        "embedding.",
    )
    rope: Rope = Rope()
    output_gate: OutputGate = True
    """Multiply each channel of an attention's output by a gate learned from the token: silu of a projection (true), its
    sigmoid, or the projection itself (identity)."""
    head_norm: HeadNorm = True
    """Scale the output of each attention head to a mean square of 1, with gains of its own, or shared by all heads.
    delta requires it, since its output is not an average."""
    head_norm_epsilon: float | None = Field(default=None, gt=0, le=1)
    """Added to the mean square of a head's output; left out, norm_epsilon."""
    norm: Literal["before", "after"] = "before"
    """Where the norms of a block are: before its attention and its MLP, or after each of them."""
    norm_epsilon: float = Field(default=1e-6, gt=0, le=1)
    """Added to the mean square in RMS norms."""
    centered_gains: bool = False
    """Store the gains of norms, but not of those of a head's output, as their difference from 1."""
    embedding_scale: float | None = Field(default=None, gt=0, le=1e6)
    """Factor of the token embeddings; left out, the square root of the width."""
    encoder: bool = False
    """objective: label: train an encoder instead of a causal model. The mean of its last hidden states is classified;
    of a causal model it is the last one."""
    tied_output: bool = True
    """Share the embedding's weights with the output layer."""
    mlp_width: int | None = Field(default=None, gt=0, le=bounds.WIDTH)
    """Inner width of the SwiGLU; left out, computed from mlp_ratio."""
    mlp_ratio: float = Field(default=2.7, gt=0, le=1024)
    """Inner width of the SwiGLU as a multiple of the width, rounded up to a multiple of 32."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of activations dropped in training, before they are added to the residual stream."""
    downsample: Downsample | None = None
    """Middle layers that work on a shortened sequence; left out, all layers work on every token."""

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

    def of_kind(self, kind: str) -> "Model":
        """Return the options of the layers of a kind: those of `mixers` in place of the model's."""
        own = next((mixer for mixer in self.mixers if mixer.kind == kind), None)
        if own is None:
            return self
        given = {name: value for name, value in own if name != "kind" and value is not None}
        return self.model_copy(update=given)

    def uses_rope(self, kind: str) -> bool:
        """Whether causal layers of a kind rotate all queries and keys."""
        positions, about = self.of_kind(kind).positions, ATTENTION_KINDS[kind]
        of_map = about.uses_feature_map and FEATURE_MAP_KINDS[self.attention.feature_map].uses_rope
        by_default = positions == "auto" and (about.uses_rope or of_map)
        return about.has_keys and (positions == "rotary" or by_default)

    def rotates(self, kind: str) -> bool:
        """Whether they rotate queries and keys, if only for a parallel window."""
        windowed = ATTENTION_KINDS[kind].recurrent and self.attention.parallel_window is not None
        return self.uses_rope(kind) or (windowed and self.of_kind(kind).positions == "auto")

    @property
    def kinds(self) -> list[str]:
        """The kind of each layer: the pattern, repeated."""
        pattern = self.attention.kind_names
        return [pattern[layer % len(pattern)] for layer in range(self.layers)]

    @property
    def mixer_kinds(self) -> list[str]:
        """The kinds of all attentions, in the order in which they read a token: that of each layer, and its n-gram
        heads."""
        layers = enumerate(self.kinds, 1)
        return [name for layer, kind in layers for name in (kind, *(["ngram"] if layer in self.add_ngram else []))]

    @property
    def window_beside(self) -> int | None:
        """Tokens of the windows beside its recurrent layers, if they have any."""
        return self.attention.parallel_window if any(ATTENTION_KINDS[kind].recurrent for kind in self.kinds) else None

    @property
    def beside_windows(self) -> str:
        """These windows in words, to follow the kinds of attention."""
        return f" beside windows of {self.window_beside:,} tokens" if self.window_beside else ""

    def layer_lengths(self, kind: str, tokens: int) -> list[int]:
        """Return the input length of each layer of a kind in an encoder; the last block of tokens may be partial."""
        factors = [self.factor if layer in self.downsampled_layers else 1 for layer in range(self.layers)]
        return [-(-tokens // factor) for factor, each in zip(factors, self.kinds, strict=True) if each == kind]

    def disagreements(self) -> Iterator[PydanticCustomError]:
        yield from self._of_heads("")
        kinds = [mixer.kind for mixer in self.mixers]
        for number, mixer in enumerate(self.mixers):
            if mixer.kind in kinds[:number]:
                yield mistake(f"mixers.{number}.kind", f"{mixer.kind} is named twice. Name each kind once.")
            elif mixer.kind not in self.mixer_kinds:
                why = f"no layer is of kind {mixer.kind}. Choose from {', '.join(dict.fromkeys(self.mixer_kinds))}."
                yield mistake(f"mixers.{number}.kind", why)
            else:
                yield from self.of_kind(mixer.kind)._of_heads(f"mixers.{number}.")
        for kind in dict.fromkeys(self.kinds):
            about, options = ATTENTION_KINDS[kind], self.of_kind(kind)
            if about.needs_head_norm and not options.head_norm:
                why = f"{kind} requires it, since its output is not an average of values. Set it to true."
                yield mistake("head_norm", why)
            if kind == "convolution" and not options.convolution:
                yield mistake("convolution", "layers of kind convolution need one. Set it to 3 or more.")
            if about.recurrent and options.key_heads:
                yield from self._of_key_heads(kind, options)
        yield from self._added_heads()
        if self.downsample and self.layers == 1:
            yield mistake("downsample", "a model of one layer has no middle. Leave downsample out.")
        elif self.downsample and not 0 < len(self.downsampled_layers) < self.layers:
            layers = self.downsample.layers or "all but the first and the last"
            left = "at full length" if self.downsampled_layers else "downsampled"
            why = f"{layers} of {self.layers} layers leaves none {left}. Give 1 to {self.layers - 1}."
            yield mistake("downsample.layers", why)
        else:
            yield from self._downsampled_tokens()

    def _of_heads(self, prefix: str) -> Iterator[PydanticCustomError]:
        """Iterate over the mistakes of numbers of heads, given below a prefix."""
        if self.heads % (self.kv_heads or 1):
            why = f"{self.kv_heads} do not divide {self.heads} heads. Use a divisor of model.{prefix}heads."
            yield mistake(f"{prefix}kv_heads", why)
        if self.query_key_norm == "all" and self.convolution:
            why = "all is not supported with a convolution. Use head, or set convolution to 0."
            yield mistake(f"{prefix}query_key_norm", why)
        if self.head_dim is None and self.width % self.heads:
            why = f"{self.heads} heads do not divide a width of {self.width}."
            yield mistake(f"{prefix}heads", f"{why} Use a divisor, or give model.{prefix}head_dim.")

    def _of_key_heads(self, kind: str, options: "Model") -> Iterator[PydanticCustomError]:
        """Iterate over the mistakes of heads of keys that are shared by layers of a kind."""
        own = next((number for number, mixer in enumerate(self.mixers) if mixer.kind == kind and mixer.key_heads), None)
        key = "key_heads" if own is None else f"mixers.{own}.key_heads"
        if options.heads % (options.key_heads or 1):
            why = f"{options.key_heads} do not divide the {options.heads} heads of {kind}. Use a divisor."
            yield mistake(key, why)
        if options.kv_heads:
            yield mistake(key, f"{kind} shares either keys and values or queries and keys. Leave out kv_heads.")

    def _added_heads(self) -> Iterator[PydanticCustomError]:
        """Iterate over the mistakes of added n-gram heads."""
        if len(set(self.add_ngram)) < len(self.add_ngram):
            yield mistake("add_ngram", f"{self.add_ngram} names a layer twice. Name each layer once.")
        if beyond := [layer for layer in self.add_ngram if layer > self.layers]:
            yield mistake("add_ngram", f"there is no layer {beyond[0]}. Choose from 1 to {self.layers}.")
        if self.add_ngram and self.downsample:
            yield mistake("add_ngram", "not supported with downsample. Leave out one of them.")

    def _downsampled_tokens(self) -> Iterator[PydanticCustomError]:
        """Iterate over the mistakes of downsampled layers whose kind reads token ids."""
        kinds = self.kinds
        wrong = [layer for layer in self.downsampled_layers if ATTENTION_KINDS[kinds[layer]].reads_tokens]
        for layer in wrong[:1]:
            why = f"{kinds[layer]} reads token ids, but layer {layer + 1} is downsampled and has none."
            remedy = "Choose another kind for the middle layers, or leave downsample out."
            yield mistake("attention.kind", f"{why} {remedy}")
