"""What contests of speed are held over, as a user may set it; imports no torch, so that help is quick."""

from collections.abc import Sequence
from typing import NamedTuple

from lmlong.errors import UsageError, nearest

ATTENTIONS: dict[str, dict[str, object]] = {
    "softmax": {"kind": "softmax"},
    "window": {"kind": "window", "window": 256},
    "elu": {"feature_map": "elu", "decay": "none"},
    "relu": {"feature_map": "relu", "decay": "none"},
    "cosine": {"feature_map": "cosine", "decay": "none"},
    "softmax-features": {"feature_map": "softmax", "decay": "none"},
    "taylor": {"feature_map": "taylor", "decay": "none"},
    "favor": {"feature_map": "favor", "decay": "none"},
    "elu-fixed": {"feature_map": "elu", "decay": "fixed"},
    "elu-learned": {"feature_map": "elu", "decay": "learned"},
    "favor-learned": {"feature_map": "favor", "decay": "learned"},
}
"""What is compared, by name: its options below model.attention."""

SHOWN = ("softmax", "elu", "elu-learned", "favor", "window")


class Grid(NamedTuple):
    """Who runs, in which number formats, over which lengths."""

    names: tuple[str, ...]
    precisions: tuple[str, ...]
    lengths: tuple[int, ...]
    limit: float  # seconds of one pass; what would take longer is left out


def choose(option: str, text: str | None, usual: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    """The words that a user listed for an option, each once, or the usual ones."""
    words = dict.fromkeys(word.strip() for word in text.split(",")) if text is not None else usual
    for word in words:
        if word not in known:
            hint = nearest(word, known) or f" Known: {', '.join(known)}."
            raise UsageError(f"{option}: there is no '{word}'.{hint}")
    return tuple(words)
