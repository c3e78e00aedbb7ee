"""The attentions that benchmarks compare: options of model.attention by name."""

from collections.abc import Mapping

from lmlong.recipe.kinds import plugin_candidates

AttentionOptions = Mapping[str, str | int]

CANDIDATES: dict[str, AttentionOptions] = {
    "softmax": {"kind": "softmax"},
    "window": {"kind": "window", "window": 256},
    "elu": {"kind": "linear", "feature_map": "elu", "decay": "none"},
    "relu": {"kind": "linear", "feature_map": "relu", "decay": "none"},
    "cosine": {"kind": "linear", "feature_map": "cosine", "decay": "none"},
    "softmax-features": {"kind": "linear", "feature_map": "softmax", "decay": "none"},
    "taylor": {"kind": "linear", "feature_map": "taylor", "decay": "none"},
    "favor": {"kind": "linear", "feature_map": "favor", "decay": "none"},
    "elu-fixed": {"kind": "linear", "feature_map": "elu", "decay": "fixed"},
    "elu-learned": {"kind": "linear", "feature_map": "elu", "decay": "learned"},
    "elu-channel": {"kind": "linear", "feature_map": "elu", "decay": "channel"},
    "favor-learned": {"kind": "linear", "feature_map": "favor", "decay": "learned"},
    "delta": {"kind": "delta", "decay": "learned"},
}


def candidates() -> dict[str, AttentionOptions]:
    """Return the candidates, including those of plug-ins."""
    return CANDIDATES | plugin_candidates()
