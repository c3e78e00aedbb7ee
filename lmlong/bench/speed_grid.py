"""The settings of the speed benchmarks; imports no torch, so that help is quick."""

from collections.abc import Mapping
from typing import NamedTuple

from lmlong.recipe.kinds import plugin_candidates

ATTENTIONS: dict[str, dict[str, object]] = {
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
"""What is compared, by name: options below model.attention."""

DEFAULT = ("softmax", "elu", "elu-learned", "favor", "window")
"""The attentions compared by default, and those of plug-ins."""


def attentions() -> dict[str, Mapping[str, object]]:
    """Return what can be compared: `ATTENTIONS`, and the attentions and feature maps of plug-ins."""
    return {**ATTENTIONS, **plugin_candidates()}


class SpeedGrid(NamedTuple):
    """Candidates, number formats and lengths."""

    names: tuple[str, ...]
    precisions: tuple[str, ...]
    lengths: tuple[int, ...]
    limit: float  # seconds of one pass; what would take longer is left out
