"""The properties of each attention and feature map, by which recipes are validated. Imports no torch.

Classes in lmlong/attention that need a value take it from here. Plug-ins work the other way round: their entries in
both dicts are made from their classes.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from lmlong.recipe.option_types import pattern_words
from lmlong.recipe.section import Options

AttentionOptions = Mapping[str, str | int]


class AttentionInfo(NamedTuple):
    """The properties of an attention; the defaults suit most."""

    summary: str = ""
    """What it computes, as `lmlong recipe options` and the docs list it; empty for a plug-in's."""
    layer: str | None = None
    """The class of its causal form, in lmlong/attention/KIND/layer.py; None if it cannot be causal."""
    encoder: bool = False
    misfit: str = ""
    """The message for a recipe of the other objective: why this attention does not fit, and which ones do; if empty, a
    general one."""
    state_growth: Literal["constant", "per token"] = "constant"
    has_keys: bool = True
    """Whether it has queries and keys; otherwise it has only values."""
    reads_tokens: bool = False
    """Whether it reads token ids, which downsampled layers do not have."""
    uses_rope: bool = False
    """Whether queries and keys are rotated unless the recipe sets it."""
    uses_feature_map: bool = False
    """Whether it has a feature map; `uses_rope` of the map then applies."""
    recurrent: bool = False
    """Whether it is a recurrence, and so can be combined with `parallel_window`."""
    exact: bool = False
    """Whether it is exact softmax attention, beside which recurrences may learn nothing."""
    needs_head_norm: bool = False
    """Whether its output is not an average of values, so that its heads must be normalized."""
    forms: Mapping[str, AttentionOptions] = MappingProxyType({})
    """The forms that benchmarks compare, options of model.attention by name; if empty, its default form."""
    options: type[Options] | None = None
    """The section of a plug-in's options, model.attention.NAME."""
    plugin: str | None = None
    """The plug-in that it comes from: an absolute path, or the name of an entry point."""

    @property
    def causal(self) -> bool:
        return self.layer is not None

    @property
    def state(self) -> str:
        """The state of its causal form in words."""
        return "constant state" if self.state_growth == "constant" else "growing state"


class FeatureMapInfo(NamedTuple):
    """The properties of a feature map."""

    uses_rope: bool = False
    signed: bool = False
    """Whether features may be negative, so that all channels of a head must decay alike."""
    options: type[Options] | None = None
    plugin: str | None = None


ATTENTION_KINDS: dict[str, AttentionInfo] = {
    "linear": AttentionInfo(
        "a sum of values, weighted through a feature map",
        "LinearAttention",
        encoder=True,
        uses_feature_map=True,
        recurrent=True,
        forms={
            "elu": {"feature_map": "elu", "decay": "none"},
            "relu": {"feature_map": "relu", "decay": "none"},
            "cosine": {"feature_map": "cosine", "decay": "none"},
            "softmax-features": {"feature_map": "softmax", "decay": "none"},
            "taylor": {"feature_map": "taylor", "decay": "none"},
            "favor": {"feature_map": "favor", "decay": "none"},
            "elu-fixed": {"feature_map": "elu", "decay": "fixed"},
            "elu-learned": {"feature_map": "elu", "decay": "learned"},
            "elu-channel": {"feature_map": "elu", "decay": "channel"},
            "favor-learned": {"feature_map": "favor", "decay": "learned"},
        },
    ),
    "delta": AttentionInfo(
        "the delta rule: a new value replaces the one stored under its key",
        "DeltaAttention",
        recurrent=True,
        needs_head_norm=True,
        forms={"delta": {"decay": "learned"}},
        misfit="delta replaces stored values in reading order, but an encoder looks at both sides. Use linear, "
        "efficient, linformer or full.",
    ),
    "window": AttentionInfo(
        "exact softmax attention over the last tokens",
        "WindowAttention",
        exact=True,
        uses_rope=True,
        forms={"window": {"window": 256}},
        misfit="window only looks at the past, but an encoder looks at both sides. Use full, or linformer, efficient "
        "or linear, whose cost is not quadratic in the text length.",
    ),
    "softmax": AttentionInfo(
        "exact softmax attention over all tokens so far",
        "SoftmaxAttention",
        exact=True,
        uses_rope=True,
        state_growth="per token",
        misfit="softmax only looks at the past, but an encoder looks at both sides. Use full, which is softmax over "
        "the whole text.",
    ),
    "ngram": AttentionInfo(
        "a lookup of what followed the last n tokens before",
        "NgramAttention",
        has_keys=False,
        reads_tokens=True,
        misfit="ngram looks up what followed the last tokens, which an encoder already sees. Use full, linformer, "
        "efficient or linear.",
    ),
    "convolution": AttentionInfo(
        "the short convolution of the values alone, without attention",
        "ConvolutionMixer",
        has_keys=False,
        misfit="convolution only looks at the past, but an encoder looks at both sides. Use full, linformer, efficient "
        "or linear.",
    ),
    "full": AttentionInfo(
        "exact softmax attention over the whole text",
        encoder=True,
        misfit="full also looks at the future, so it cannot be causal. Use softmax, which only looks at the past, or "
        "train an encoder by objective: masked.",
    ),
    "linformer": AttentionInfo(
        "softmax attention over keys and values that are projected to k slots",
        encoder=True,
        misfit="linformer mixes all positions, also future ones, into each projected key and value, so it cannot be "
        "causal (docs/guides/encoders.md). Use linear, window or softmax, or train an "
        "encoder by objective: masked.",
    ),
    "efficient": AttentionInfo(
        "softmax over features for queries, and over the whole text for keys",
        encoder=True,
        misfit="efficient normalises keys over the whole sequence, also the future, so it cannot be causal. Use linear "
        "with feature_map: softmax, the closest causal attention, window or softmax, or train an encoder by "
        "objective: masked.",
    ),
}

FEATURE_MAP_KINDS: dict[str, FeatureMapInfo] = {
    "elu": FeatureMapInfo(),
    "relu": FeatureMapInfo(),
    "cosine": FeatureMapInfo(uses_rope=True, signed=True),
    "softmax": FeatureMapInfo(),
    "hedgehog": FeatureMapInfo(),
    "taylor": FeatureMapInfo(signed=True),
    "favor": FeatureMapInfo(uses_rope=True),
}


def kinds_in_words() -> str:
    """Return every kind and what it computes, for the explanation of `kind`."""
    about = ATTENTION_KINDS.items()
    causal = [f"{kind} ({info.summary}; {info.state})" for kind, info in about if info.causal]
    encoder = [f"{kind} ({info.summary})" for kind, info in about if info.encoder]
    return f"Causal: {', '.join(causal)}. For an encoder: {', '.join(encoder)}."


def why_misfit(kind: str) -> str:
    """Return why a kind does not fit the other objective, and which ones do."""
    about = ATTENTION_KINDS[kind]
    fitting = [name for name, info in ATTENTION_KINDS.items() if (info.encoder if about.causal else info.causal)]
    form = "encoder" if about.causal else "causal"
    return about.misfit or f"{kind} has no {form} form. Use one of {', '.join(fitting)}."


def rotating() -> list[str]:
    """Return the kinds and feature maps with rotary positions by default."""
    tables = (ATTENTION_KINDS, FEATURE_MAP_KINDS)
    return [name for table in tables for name, about in table.items() if about.uses_rope]


def _of_plugins() -> Iterator[tuple[str, AttentionInfo | FeatureMapInfo]]:
    """Iterate over the attentions and feature maps of plug-ins; no name is in both dicts."""
    yield from ((name, kind) for name, kind in ATTENTION_KINDS.items() if kind.plugin)
    yield from ((name, kind) for name, kind in FEATURE_MAP_KINDS.items() if kind.plugin)


def plugin_sections(plugins: Collection[str] | None = None) -> dict[str, type[Options]]:
    """Return the option sections of these plug-ins, or of all, by their names in model.attention."""
    selected = {name: about for name, about in _of_plugins() if plugins is None or about.plugin in plugins}
    return {name: about.options for name, about in selected.items() if about.options}


def attention_words(attention: Any) -> tuple[list[str], list[str]]:
    """Return the kinds and feature maps named in a section model.attention, which may be invalid."""
    if not isinstance(attention, dict):
        return [], []
    kind, feature_map = attention.get("kind"), attention.get("feature_map")
    kinds = kind if isinstance(kind, list) else pattern_words(kind) if isinstance(kind, str) else []
    return [word for word in kinds if isinstance(word, str)], [feature_map] if isinstance(feature_map, str) else []


def plugins_needed(attention: Any) -> tuple[str, ...]:
    """Return the plug-ins whose attentions, feature maps or options the section model.attention uses."""
    kinds, maps = attention_words(attention)
    sections = list(attention) if isinstance(attention, dict) else []
    named = {*kinds, *maps, *sections}
    return tuple(dict.fromkeys(str(about.plugin) for name, about in _of_plugins() if name in named))


def plugin_candidates() -> dict[str, AttentionOptions]:
    """Return the attentions and feature maps of plug-ins as candidates of a benchmark."""
    kinds: dict[str, AttentionOptions] = {kind: {"kind": kind} for kind, info in ATTENTION_KINDS.items() if info.plugin}
    maps = [name for name, info in FEATURE_MAP_KINDS.items() if info.plugin]
    return kinds | {name: {"kind": "linear", "feature_map": name, "decay": "none"} for name in maps}


def candidates() -> dict[str, AttentionOptions]:
    """Return the attentions that benchmarks compare, options of model.attention by name: the forms of each causal kind,
    and those of plug-ins."""
    causal = [(kind, info) for kind, info in ATTENTION_KINDS.items() if info.causal]
    forms = [(kind, *form) for kind, info in causal for form in (info.forms or {kind: {}}).items()]
    return {name: {"kind": kind, **form} for kind, name, form in forms} | plugin_candidates()


def why_state_grows(kinds: Iterable[str]) -> str | None:
    """Return why states of layers of these kinds cannot be passed on through a long text; None if they can."""
    growing = [kind for kind in dict.fromkeys(kinds) if ATTENTION_KINDS[kind].state_growth == "per token"]
    if not growing:
        return None
    return (
        f"the state of {' and '.join(growing)} attention grows with each token, so it cannot be passed on "
        "indefinitely. Leave this out, or use linear or window attention in all layers."
    )
