"""What is known of a session without its state, from the metadata of its file."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from lmlong.model.language_model import MOST_TOKENS

ID = re.compile(r"[0-9a-f]{24}")

LATEST = 10**13
"""Seconds since 1970 before which sessions are made."""


EARLIER = ("output", "bias")
"""What a session learned, in files of earlier versions."""


class SessionInfo(NamedTuple):
    """A session as shown to clients."""

    id: str
    parent: str | None
    """The session that it was forked from."""
    made: float
    """Seconds since 1970."""
    tokens: int
    bytes: int
    """Of its file."""
    state_bytes: int | None
    """Of its state in memory; unknown for files from before it was noted."""
    tail: str
    """The end of its text."""
    learns: bool
    """Whether it learns from its text."""

    @property
    def cursor(self) -> str:
        """The place of a session in a list, as text whose order is that of the list."""
        return f"{self.made:020.6f}-{self.id}"


def info_of(name: str, about: Mapping[str, Any], size: int) -> SessionInfo:
    """Return the info in the metadata of a file of `size` bytes. Raise ValueError for values that no server writes:
    anybody can compute a digest."""
    made, tokens, parent = about["made"], about["tokens"], about["parent"]
    learns, state = about.get("learns"), about.get("state_bytes")  # which older files have not
    values_are_valid = {
        "made": type(made) in (int, float) and 0 <= made < LATEST,
        "tokens": 0 < tokens <= MOST_TOKENS,
        "parent": parent is None or (type(parent) is str and ID.fullmatch(parent) is not None),
        "learns": learns is None or type(learns) is bool or learns in EARLIER,
        "state_bytes": state is None or (type(state) is int and 0 <= state < 1 << 63),
    }
    if not all(values_are_valid.values()):
        raise ValueError(min(key for key, is_valid in values_are_valid.items() if not is_valid))
    return SessionInfo(name, parent, float(made), tokens, size, state, about["tail"], bool(learns))
