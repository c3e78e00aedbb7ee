"""The models that are measured, by name: options of a recipe beside those of recipe.yaml."""

from typing import Any

from lmlong.recipe.kinds import ATTENTION_KINDS

DECAYS = ("none", "fixed", "learned", "channel")

FEATURE_MAPS = ("elu", "relu", "cosine", "softmax", "hedgehog", "taylor", "favor")

SIGNED = ("cosine", "taylor")
"""Feature maps that a decay by channel refuses."""


def attention(kind: Any, **options: Any) -> dict[str, Any]:
    """Return the options of an attention; its sections are dicts."""
    return {"model.attention": {"kind": kind, **options}}


def linear(feature_map: str = "elu", decay: str = "learned", **options: Any) -> dict[str, Any]:
    return attention("linear", feature_map=feature_map, decay=decay, **options)


def model(**options: Any) -> dict[str, Any]:
    """Return options of the section `model`."""
    return {f"model.{key}": value for key, value in options.items()}


LIKE_LLAMA = model(
    convolution=0,
    positions="rotary",
    rope={"base": 500.0, "scaling": {"factor": 3.0, "original_length": 40}},
    output_gate=False,
    head_norm=False,
    norm_epsilon=1e-3,
    embedding_scale=0.7,
    tied_output=False,
    mlp_width=20,
)

LINEAR = {
    f"linear {feature_map} {decay}": linear(feature_map, decay)
    for feature_map in FEATURE_MAPS
    for decay in DECAYS
    if not (decay == "channel" and feature_map in SIGNED)
}

KINDS: dict[str, dict[str, Any]] = {
    "linear elu learned": linear("elu"),
    "linear elu fixed": linear("elu", "fixed"),
    "linear elu channel": linear("elu", "channel"),
    "linear relu learned": linear("relu"),
    "linear cosine learned": linear("cosine"),
    "linear softmax learned": linear("softmax"),
    "linear hedgehog learned": linear("hedgehog"),
    "linear taylor learned": linear("taylor"),
    "linear favor learned": linear("favor"),
    "linear favor hyperbolic": linear("favor", favor={"form": "hyperbolic", "norms": "quantile"}),
    "linear parallel-window": linear("hedgehog", parallel_window=16),
    "delta silu learned": attention("delta"),
    "delta elu fixed": attention("delta", decay="fixed", delta={"feature_map": "elu"}),
    "delta parallel-window": attention("delta", parallel_window=16),
    "delta softplus": attention(
        "delta", decay="softplus", delta={"feature_map": "identity", "max_beta": 2, "beta_bias": False}
    )
    | model(convolution_activation="silu", heads=4, key_heads=2, head_norm="shared", centered_gains=True),
    "convolution": attention(["convolution", "softmax"])
    | model(convolution=3, input_gate=True, output_gate="identity", query_key_norm="head", norm="after"),
    "ngram": attention(["linear", "ngram"], ngram={"sizes": [1, 2], "buckets": 64}),
    "window": attention("window", window=24),
    "window linear": attention(["window", "linear"], window=24),
    "softmax": attention("softmax"),
    "softmax like-llama": attention("softmax") | LIKE_LLAMA | model(heads=4, kv_heads=2),
    "linear head sizes": linear() | model(head_dim=12, value_dim=20),
    "hourglass mean": linear() | model(layers=3, downsample={"factor": 4, "kind": "mean"}),
    "hourglass conv": linear() | model(layers=3, downsample={"factor": 4, "kind": "conv"}),
    "hourglass softmax": attention("softmax") | model(layers=3, downsample={"factor": 3, "kind": "max"}),
}
"""Causal models that are trained, decoded and saved."""

_MEASURED = [options["model.attention"]["kind"] for options in KINDS.values()]
KINDS |= {
    kind: attention(kind)
    for kind, about in ATTENTION_KINDS.items()
    if about.causal and not any(kind == each or (isinstance(each, list) and kind in each) for each in _MEASURED)
}

DETAILS: dict[str, dict[str, Any]] = {
    "linear favor fixed-norms": linear("favor", favor={"norms": "fixed", "features": 24}),
    "linear taylor whole": linear("taylor", taylor={"width": None}),
    **{
        f"delta {feature_map} {decay}": attention("delta", decay=decay, delta={"feature_map": feature_map})
        for feature_map in ("silu", "elu", "relu")
        for decay in ("none", "fixed", "learned")
    },
    "linear rope": linear() | model(positions="rotary"),
    "linear cosine no-rope": linear("cosine") | model(positions="none"),
    "linear no-convolution": linear() | model(convolution=0),
    "linear no-gate": linear() | model(output_gate=False),
    "linear no-head-norm": linear() | model(head_norm=False),
    "linear untied": linear() | model(tied_output=False),
    "linear kv-heads": linear() | model(heads=4, kv_heads=2),
    "linear like-llama": linear() | LIKE_LLAMA,
    "linear dropout": linear() | model(dropout=0.1),
    "linear segments": linear() | {"training.segment": 32},
    "delta segments": attention("delta") | {"training.segment": 32},
    "hourglass segments": linear() | model(layers=3, downsample={"factor": 4}) | {"training.segment": 32},
    "linear activation-checkpointing": linear() | {"training.activation_checkpointing": True},
    "linear bf16": linear() | {"training.precision": "bf16"},
    "linear favor bf16": linear("favor") | {"training.precision": "bf16"},
    "linear channel bf16": linear("elu", "channel") | {"training.precision": "bf16"},
    "delta bf16": attention("delta") | {"training.precision": "bf16"},
    "ngram bf16": attention(["linear", "ngram"]) | {"training.precision": "bf16"},
    "window bf16": attention("window", window=24) | {"training.precision": "bf16"},
    "softmax bf16": attention("softmax") | {"training.precision": "bf16"},
    "softmax no-rope": attention("softmax") | model(positions="none"),
    "window no-rope": attention("window", window=24) | model(positions="none"),
}
"""Causal models whose gradients alone are measured."""


def encoder(kind: Any, **options: Any) -> dict[str, Any]:
    return {"objective": "masked", **attention(kind, decay="none", **options), "model.convolution": 0}


ENCODERS: dict[str, dict[str, Any]] = {
    "encoder full": encoder("full"),
    "encoder efficient": encoder("efficient"),
    "encoder linear elu": encoder("linear"),
    "encoder linear hedgehog": encoder("linear", feature_map="hedgehog"),
    "encoder linear favor": encoder("linear", feature_map="favor"),
    **{
        f"encoder linformer {projection}": encoder("linformer", linformer={"projected": 16, "projection": projection})
        for projection in ("linear", "mean", "max", "conv")
    },
    **{
        f"encoder linformer {sharing}": encoder("linformer", linformer={"projected": 16, "sharing": sharing})
        for sharing in ("none", "key-value", "layerwise")
    },
    "encoder full absolute": encoder("full") | model(positions="absolute"),
    "encoder hourglass": encoder("full") | model(layers=3, downsample={"factor": 4}),
    "encoder hourglass conv": encoder("linear") | model(layers=3, downsample={"factor": 4, "kind": "conv"}),
}
