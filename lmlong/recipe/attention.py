"""Options of attention: the kind of each layer, and the options of each kind."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import Field
from pydantic_core import PydanticCustomError

from lmlong.recipe import bounds
from lmlong.recipe.kinds import ATTENTION_KINDS, FEATURE_MAP_KINDS, kinds_in_words
from lmlong.recipe.option_types import LENGTH, NameIn, PatternIn
from lmlong.recipe.section import Options, mistake

KindName = Annotated[str, NameIn(ATTENTION_KINDS)]

Slots = Annotated[int, Field(gt=0, le=bounds.TOKENS)]


class Taylor(Options):
    """The second-order features of feature_map: taylor."""

    width: int | None = Field(default=16, gt=0, le=1024)
    """Width r of the projection of queries and keys, which gives 1 + r + r (r + 1) / 2 features; null for no
    projection, with the head width as r."""


class Favor(Options):
    """The random features of feature_map: favor."""

    features: int | None = Field(default=None, gt=0, le=bounds.FEATURES)
    """Features of each head; left out, twice the head width."""
    form: Literal["positive", "hyperbolic"] = "positive"
    """positive, or hyperbolic: half as many random rows, each used with both signs."""
    norms: Literal["chi", "fixed", "quantile"] = "chi"
    """Norms of the random rows: chi (as sampled, unbiased), fixed (sqrt(width)), or quantile (spread over the quantiles
    of chi)."""
    resample_every: int | None = Field(default=None, gt=0, le=bounds.COUNT)
    """Training steps between new draws of the random rows; left out, the first draw is kept."""

    def disagreements(self) -> Iterator[PydanticCustomError]:
        if self.form == "hyperbolic" and (self.features or 0) % 2:
            yield mistake("features", f"{self.features} is odd; hyperbolic features come in pairs.")


class Linformer(Options):
    """Options of kind: linformer, which shortens keys and values from the length of the sequence to k slots."""

    projected: Slots | Annotated[list[Slots | Annotated[list[Slots], Field(min_length=1)]], Field(min_length=1)] = 128
    """k: one number, a list with a number for each linformer layer, or a list of lists with a number for each head of
    each layer."""
    sharing: Literal["none", "headwise", "key-value", "layerwise"] = "headwise"
    """How the projections E and F are shared: own ones for each head (none), for each layer (headwise), a single one
    for the keys and values of each layer (key-value), or a single one for all layers (layerwise)."""
    projection: Literal["linear", "mean", "max", "conv"] = "linear"
    """How tokens become slots: by a learned matrix (linear), mean or max pooling, or a convolution (conv). The latter
    three have a stride of n / k for sequences of n tokens."""

    def slots(self, layers: int, heads: int) -> list[list[int]]:
        """Return k for each head of each layer; the lists may have wrong lengths."""
        of_layers = [self.projected] * layers if isinstance(self.projected, int) else self.projected
        return [[layer] * heads if isinstance(layer, int) else [*layer] for layer in of_layers]

    def misfit(self, longest: Sequence[int], heads: int) -> tuple[str, str] | None:
        """Return the option that does not fit layers with `heads` heads and these maximum input lengths, and why; None
        if all fit."""
        lengths = " and ".join(map(str, dict.fromkeys(longest)))
        if self.sharing == "layerwise" and len(set(longest)) > 1:
            return "sharing", f"layers with inputs of {lengths} vectors cannot share one matrix. Use headwise."
        if why := self._mismatch(len(longest), heads):
            return "projected", why
        shapes = zip(self.slots(len(longest), heads), longest, strict=True)
        for count, most in sorted({(count, most) for layer, most in shapes for count in layer}):
            if count > most:
                return "projected", f"{count} slots for a longest input of {most}. Use 1 up to that."
            if self.projection != "linear" and most % count:
                return "projected", (
                    f"{count} does not divide a longest input of {most}; projection {self.projection} needs slots of "
                    "equal size. Use a divisor."
                )
        return None

    def _mismatch(self, layers: int, heads: int) -> str | None:
        """Return why `projected` does not fit the number of layers and heads or their sharing; None if it does."""
        slots = self.slots(layers, heads)
        if len(slots) != layers or any(len(layer) != heads for layer in slots):
            return f"{self.projected} is not one number, one for each of {layers} layers, or {heads} for each."
        if self.sharing != "none" and any(len(set(layer)) > 1 for layer in slots):
            return f"heads with different k cannot share a matrix; sharing is {self.sharing}. Use none."
        if self.sharing == "layerwise" and any(layer != slots[0] for layer in slots):
            return "layers with different k cannot share a matrix; sharing is layerwise. Use headwise."
        return None


MAX_NGRAM = 32
"""Largest n of an n-gram head."""


class Ngram(Options):
    """Options of kind: ngram, whose heads look up what followed the last n tokens at their earlier occurrences in the
    document."""

    sizes: list[Annotated[int, Field(gt=0, le=MAX_NGRAM)]] = Field(default=[1, 2, 3, 4], min_length=1)
    """n of each head; a shorter list is repeated over the heads."""
    buckets: int = Field(default=16384, gt=0, le=2**24)
    """Rows in the table of each head; n-grams that hash to the same row replace each other."""


class Delta(Options):
    """Options of kind: delta, the delta rule: a new value replaces the one stored under its key."""

    feature_map: Literal["silu", "elu", "relu", "identity"] = "silu"
    """Function applied to queries and keys before they are normalized to length 1."""
    max_beta: Literal[1, 2] = 1
    """Upper limit of beta, the share of a stored value that a token replaces. With 2, a token may also reverse it."""
    beta_bias: bool = True
    """Whether the gate beta has a bias for each head."""


class Attention(Options):
    """Attention layers. Options that do not apply to a kind are ignored by it."""

    kind: Annotated[str, PatternIn(ATTENTION_KINDS)] | Annotated[list[KindName], Field(min_length=1)] = Field(
        default=["linear", "ngram", "linear"],
        description="Attention of the layers. A list is a pattern repeated over the layers; 3linear+softmax is short "
        "for three linear and one softmax; {softmax: window} replaces a kind of the run that training begins from. "
        f"Left out for an encoder or with downsample: linear. {kinds_in_words()}",
    )
    feature_map: Annotated[str, NameIn(FEATURE_MAP_KINDS)] = "elu"
    """linear: feature map of queries and keys, instead of softmax's exponential."""
    decay: Literal["none", "fixed", "learned", "softplus", "channel"] = "learned"
    """linear, delta: how the state is forgotten: none, at a fixed rate for each head, by a gate learned from the token
    for each head (learned; softplus is another form, exp(-rate softplus(gate)), with a learned rate for each head), or
    for each feature (channel; linear only). An encoder has none."""
    longest_memory: Annotated[int, Field(gt=2, le=bounds.TOKENS), LENGTH] = 8192
    """linear, delta with a decay: tokens after which 1/e of the state is left in the head with the longest memory.
    Memories of the other heads are spaced evenly on a log scale, from 2 tokens on. Learned decays start at these
    values."""
    window: Annotated[int, Field(gt=0, le=bounds.TOKENS), LENGTH] = 256
    """window: number of tokens that each token attends to, including itself."""
    window_sink: bool = False
    """window, parallel_window: whether each head may also attend to a learned value, the sink, as if it were one more
    token. Pretrained models attend to their first token in this way; lmlong convert makes a sink of it."""
    parallel_window: Annotated[int | None, Field(gt=0, le=bounds.TOKENS), LENGTH] = None
    """linear, delta: number of last tokens that the same layer also attends to exactly. A gate learned from the token
    weighs that output against the recurrence's. Left out, none."""
    taylor: Taylor = Taylor()
    favor: Favor = Favor()
    linformer: Linformer = Linformer()
    delta: Delta = Delta()
    ngram: Ngram = Ngram()

    def disagreements(self) -> Iterator[PydanticCustomError]:
        if self.decay == "channel" and "delta" in self.kind_names:
            why = "delta has one decay for each head, not for each channel. Use learned, or only linear layers."
            yield mistake("decay", why)
        if self.decay == "channel" and "linear" in self.kind_names and FEATURE_MAP_KINDS[self.feature_map].signed:
            yield mistake(
                "decay",
                f"features of {self.feature_map} may be negative, so their products stay positive only if all channels "
                "decay at the same rate. Use learned, or another feature_map.",
            )

    @property
    def kind_names(self) -> list[str]:
        """The kinds in the pattern."""
        return [self.kind] if isinstance(self.kind, str) else self.kind

    def plugin_options(self, name: str) -> Options:
        """Return the options of a plug-in's attention or feature map: its section, or its defaults."""
        about = ATTENTION_KINDS.get(name) or FEATURE_MAP_KINDS[name]
        assert about.options is not None
        return getattr(self, name, None) or about.options()
