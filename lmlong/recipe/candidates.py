"""The attentions that experiments and benchmarks compare: options of model.attention by name."""

from collections.abc import Mapping

from lmlong.recipe.kinds import plugin_candidates

AttentionOptions = Mapping[str, str | int]

CANDIDATES: dict[str, AttentionOptions] = {
    "softmax": {"kind": "softmax"},
    "window": {"kind": "window", "window": 64},
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
    "elu-learned-window": {"kind": "3linear+window", "feature_map": "elu", "decay": "learned", "window": 64},
    "elu-learned-softmax": {"kind": "3linear+softmax", "feature_map": "elu", "decay": "learned"},
    "delta-softmax": {"kind": "3delta+softmax", "decay": "learned"},
    "delta-window": {"kind": "3delta+window", "decay": "learned", "window": 64},
    "elu-learned-ngram": {"kind": "linear+ngram+2linear", "feature_map": "elu", "decay": "learned"},
    "elu-channel-ngram": {"kind": "linear+ngram+2linear", "feature_map": "elu", "decay": "channel"},
    "delta-ngram": {"kind": "delta+ngram+2delta", "decay": "learned"},
    "delta-window-ngram": {"kind": "delta+ngram+delta+window", "decay": "learned", "window": 64},
}

NOT_TRAINED = ("elu-fixed", "favor-learned")
"""Candidates that `bench compare` trains only if named: their losses are like their neighbours', only their speeds
differ."""

SPEED_WINDOW = 256
"""The window of speed benchmarks, usual for models larger than those that `bench compare` trains."""


def candidates() -> dict[str, AttentionOptions]:
    """Return the candidates, including those of plug-ins."""
    return CANDIDATES | plugin_candidates()


def single_kinds() -> dict[str, AttentionOptions]:
    """Return the candidates that have one kind in all layers, with the window of speed benchmarks."""
    return {
        name: {**options, "window": SPEED_WINDOW} if options["kind"] == "window" else options
        for name, options in candidates().items()
        if "+" not in str(options["kind"])
    }
