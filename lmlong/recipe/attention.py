"""Options of attention: the kinds of the layers, and the options of each kind."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import Field
from pydantic_core import PydanticCustomError

from lmlong.recipe import bounds
from lmlong.recipe.kinds import ATTENTION_KINDS, FEATURE_MAP_KINDS
from lmlong.recipe.option_types import LENGTH, NameIn, PatternIn
from lmlong.recipe.section import Options, mistake

KindName = Annotated[str, NameIn(ATTENTION_KINDS)]

Slots = Annotated[int, Field(gt=0, le=bounds.TOKENS)]


class Taylor(Options):
    """The second-order features of feature_map: taylor."""

    width: int | None = Field(default=16, gt=0, le=1024)
    """Width r of the projection of queries and keys, which makes 1 + r + r (r + 1) / 2 features; null projects nothing,
    and r is that of the head."""


class Favor(Options):
    """The random features of feature_map: favor."""

    features: int | None = Field(default=None, gt=0, le=bounds.FEATURES)
    """Features of a head; left out, twice the head width."""
    form: Literal["positive", "hyperbolic"] = "positive"
    """positive, or hyperbolic: each random row used with both signs, so half as many are drawn."""
    norms: Literal["chi", "fixed", "quantile"] = "chi"
    """Lengths of the random rows: chi as sampled (unbiased), fixed at sqrt(width), or spread over the quantiles."""
    resample_every: int | None = Field(default=None, gt=0, le=bounds.COUNT)
    """Training steps between new draws; left out, the first draw stays."""

    def disagreements(self) -> Iterator[PydanticCustomError]:
        if self.form == "hyperbolic" and (self.features or 0) % 2:
            yield mistake("features", f"{self.features} is odd; hyperbolic features come in pairs.")


class Linformer(Options):
    """kind: linformer: how keys and values are shortened, from as many tokens as a sequence has to k slots."""

    projected: Slots | Annotated[list[Slots | Annotated[list[Slots], Field(min_length=1)]], Field(min_length=1)] = 128
    """k: a number, or a list of one for each layer of the kind, or of a list for each layer, one k for each head."""
    sharing: Literal["none", "headwise", "key-value", "layerwise"] = "headwise"
    """How E and F are shared: each head has its own (none), each layer (headwise), each layer a single one for keys and
    values (key-value), or all layers share a single one (layerwise)."""
    projection: Literal["linear", "mean", "max", "conv"] = "linear"
    """A learned matrix, mean or max pooling, or a convolution, the latter three with a stride of n / k for sequences of
    n tokens."""

    def slots(self, layers: int, heads: int) -> list[list[int]]:
        """Return k of each head of each layer; the lists may be too short or too long."""
        of_layers = [self.projected] * layers if isinstance(self.projected, int) else self.projected
        return [[layer] * heads if isinstance(layer, int) else [*layer] for layer in of_layers]

    def misfit(self, longest: Sequence[int], heads: int) -> tuple[str, str] | None:
        """Return an option that does not fit layers with `heads` heads and these longest inputs, and why."""
        lengths = " and ".join(map(str, dict.fromkeys(longest)))
        if self.sharing == "layerwise" and len(set(longest)) > 1:
            return "sharing", f"layers that read {lengths} vectors share no matrix; layerwise is for all. Use headwise."
        if why := self._mismatch(len(longest), heads):
            return "projected", why
        shapes = zip(self.slots(len(longest), heads), longest, strict=True)
        for count, most in sorted({(count, most) for layer, most in shapes for count in layer}):
            if count > most:
                return "projected", f"{count} slots for a longest input of {most}. Use 1 up to that."
            if self.projection != "linear" and most % count:
                return "projected", (
                    f"{count} does not divide a longest input of {most}; projection {self.projection} makes slots of "
                    "equally many. Use a divisor."
                )
        return None

    def _mismatch(self, layers: int, heads: int) -> str | None:
        """Return why `projected` does not fit the number of layers and heads, or their sharing."""
        slots = self.slots(layers, heads)
        if len(slots) != layers or any(len(layer) != heads for layer in slots):
            return f"{self.projected} is not one number, one for each of {layers} layers, or {heads} for each."
        if self.sharing != "none" and any(len(set(layer)) > 1 for layer in slots):
            return f"heads of different sizes share no matrix; sharing is {self.sharing}. Use none."
        if self.sharing == "layerwise" and any(layer != slots[0] for layer in slots):
            return "layers of different sizes share no matrix; sharing is layerwise. Use headwise."
        return None


MAX_NGRAM = 32
"""Largest n of an n-gram head."""


class Ngram(Options):
    """kind: ngram: heads that look up what followed the last n tokens earlier in the document."""

    sizes: list[Annotated[int, Field(gt=0, le=MAX_NGRAM)]] = Field(default=[1, 2, 3, 4], min_length=1)
    """n of each head; a shorter list is repeated over the heads."""
    buckets: int = Field(default=16384, gt=0, le=2**24)
    """Rows of a head's state; n-grams that share a row replace each other."""


class Delta(Options):
    """kind: delta: the delta rule, by which a value replaces what its key has stored."""

    feature_map: Literal["silu", "elu", "relu"] = "silu"
    """What queries and keys pass through before they are scaled to length one."""


class Attention(Options):
    """Attention of each token to others. A kind ignores options that it does not have."""

    kind: Annotated[str, PatternIn(ATTENTION_KINDS)] | Annotated[list[KindName], Field(min_length=1)] = Field(
        default=["linear", "ngram", "linear"]
    )
    """To the past: linear (constant state), delta (the same, replacing what a key has stored), ngram (looking up the
    last tokens), window (exact over the last tokens, constant state) or softmax (exact, growing state). For an encoder,
    to all of the text: full (exact), linformer, efficient, or linear. A list is a pattern repeated over the layers; in
    one word, 3linear+softmax is three linear and one softmax. Left out for an encoder, or with downsample: linear."""
    feature_map: Annotated[str, NameIn(FEATURE_MAP_KINDS)] = "elu"
    """linear: the map that replaces softmax's exponential, kept non-negative."""
    decay: Literal["none", "fixed", "learned", "channel"] = "learned"
    """linear, delta: forget nothing, at a fixed rate a head, or by a gate learned from the token; channel, for linear
    alone, learns a gate for each feature. An encoder has none."""
    longest_memory: Annotated[int, Field(gt=2, le=bounds.TOKENS), LENGTH] = 8192
    """linear, delta with a decay: tokens after which 1/e of the state is left in the head that keeps longest (learned
    decays begin there); the heads before it keep from 2 tokens on, evenly on a log scale."""
    window: Annotated[int, Field(gt=0, le=bounds.TOKENS), LENGTH] = 256
    """window: how many tokens are seen, the token itself among them."""
    parallel_window: Annotated[int | None, Field(gt=0, le=bounds.TOKENS), LENGTH] = None
    """linear, delta: the same layer also sees this many last tokens exactly, and a gate learned from the token weighs
    what it reads there against what it recalls; left out, none."""
    taylor: Taylor = Taylor()
    favor: Favor = Favor()
    linformer: Linformer = Linformer()
    delta: Delta = Delta()
    ngram: Ngram = Ngram()

    def disagreements(self) -> Iterator[PydanticCustomError]:
        if self.decay == "channel" and "delta" in self.kind_names:
            yield mistake(
                "decay", "delta forgets by the head, not by the channel. Use learned, or linear layers alone."
            )
        if self.decay == "channel" and "linear" in self.kind_names and FEATURE_MAP_KINDS[self.feature_map].signed:
            yield mistake(
                "decay",
                f"features of {self.feature_map} have signs, and their products are positive only while all channels "
                "are forgotten alike. Use learned, or another feature_map.",
            )

    @property
    def kind_names(self) -> list[str]:
        """The attentions of the pattern."""
        return [self.kind] if isinstance(self.kind, str) else self.kind

    def plugin_options(self, name: str) -> Options:
        """Return the options of the attention or feature map of a plug-in: its section, or its defaults."""
        about = ATTENTION_KINDS.get(name) or FEATURE_MAP_KINDS[name]
        assert about.options is not None
        return getattr(self, name, None) or about.options()
