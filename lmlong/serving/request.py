"""Requests to the scheduler, and its events."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from lmlong.inference.row import End
from lmlong.inference.state_table import Piece, Place
from lmlong.inference.unread import UnreadText
from lmlong.model.sampling_options import MAX_TOKENS, Sampling

REPORT_SECONDS = 0.2
"""Time between two reports of progress."""


@dataclass(frozen=True)
class Request:
    """A text to continue, and how."""

    prompt: str | tuple[int, ...]
    """A text; or the tokens of the beginning of a document, which are read as they are."""
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int | None = MAX_TOKENS
    """None: until the model ends the document."""
    stop: tuple[str, ...] = ()
    start: Place | None = None
    """The place in a session before the prompt, or None for a new text."""
    learn: bool = False
    """Whether the text is learned from, from the prompt on; a session that learns already continues to."""
    draws: tuple[int, ...] = (0,)
    """Numbers that distinguish the random draws of several texts with the same seed."""
    alternatives: int | None = None
    """The number of most likely tokens whose log-probability is returned too; None: no log-probabilities."""
    reports: bool = False
    """Whether events report how much of the prompt has been read."""
    keep_session: bool = False
    """Whether the last event has the turn, which ends with exactly the generated text."""


class Turn(NamedTuple):
    """What a request adds to a session."""

    read: Place
    """The place after the prompt, without its unread text."""
    prompt: tuple[Piece, ...]
    written: tuple[Piece, ...] = ()
    """The pieces after `read`, which no state has read as such."""
    unread: UnreadText = UnreadText()
    learn: bool = False
    """Whether the session learns from its text from now on."""
    options: Mapping[str, Any] = {}
    """Those that differ from the defaults, if the model wrote."""


class TokenLikelihood(NamedTuple):
    """A token and its log-probability, before any sampling option."""

    token: int
    log_probability: float


class WrittenToken(NamedTuple):
    """A generated token, and the most likely ones in its place."""

    token: int
    log_probability: float
    alternatives: tuple[TokenLikelihood, ...]


class Progress(NamedTuple):
    """How much of a prompt has been read, in bytes of its text, with the fields of its JSON."""

    read_bytes: int
    total_bytes: int
    object: Literal["progress"] = "progress"


class Event(NamedTuple):
    """An event of a request: text that is final, the generated token, or the end."""

    text: str = ""
    token: WrittenToken | None = None  # where a request asks for log-probabilities
    end: End | None = None
    error: BaseException | None = None  # which ends it too
    turn: Turn | None = None  # at the end, where it is asked for
    prompt_tokens: int = 0  # at the end: tokens of the prompt,
    cached_tokens: int = 0  # how many of them were read before,
    written_tokens: int = 0  # and tokens written
    progress: Progress | None = None  # while the prompt is read, where it is asked for


class ReadingProgress:
    """Counts the bytes of a prompt that have been read, by the tokens that cover them."""

    def __init__(self, text: str, token_bytes: np.ndarray, known: Sequence[int] = ()):
        """`known` are tokens that need not be read."""
        self._total = len(text.encode("utf-8", "surrogatepass"))
        self._token_bytes = token_bytes
        self._read = self._bytes_of(known)
        self._next = time.monotonic() + REPORT_SECONDS

    def after(self, tokens: Sequence[int]) -> Progress | None:
        """Count more tokens; return the progress, or None if the last report is too recent."""
        self._read += self._bytes_of(tokens)
        if time.monotonic() < self._next:
            return None
        self._next = time.monotonic() + REPORT_SECONDS
        return Progress(min(self._read, self._total), self._total)

    def _bytes_of(self, tokens: Sequence[int]) -> int:
        return int(self._token_bytes[np.array(tokens, np.int64)].sum())
