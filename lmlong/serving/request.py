"""Requests to the engine, and its events."""

from dataclasses import dataclass, field
from typing import NamedTuple

from lmlong.inference.generation import End
from lmlong.inference.session import Session
from lmlong.model.sampling_options import MAX_TOKENS, Sampling
from lmlong.serving.reading import Progress


@dataclass(frozen=True)
class Request:
    """A text to continue, and how."""

    prompt: str | tuple[int, ...]
    """A text; or the tokens of the beginning of a document, which are read as they are."""
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int | None = MAX_TOKENS
    """None: until the model ends the document."""
    stop: tuple[str, ...] = ()
    start: Session | None = None
    """The session before the prompt, or None."""
    learn: bool = False
    """Whether the text is learned from, from the prompt on; a session that learns already continues to."""
    draws: tuple[int, ...] = (0,)
    """Numbers that distinguish the random draws of several texts with the same seed."""
    alternatives: int | None = None
    """The number of most likely tokens whose log-probability is returned too; None: no log-probabilities."""
    reports: bool = False
    """Whether events report how much of the prompt has been read."""
    keep_session: bool = False
    """Whether the last event has the session after exactly the generated text."""


class TokenLikelihood(NamedTuple):
    """A token and its log-probability, before any sampling option."""

    token: int
    log_probability: float


class WrittenToken(NamedTuple):
    """A generated token, and the most likely ones in its place."""

    token: int
    log_probability: float
    alternatives: tuple[TokenLikelihood, ...]


class Event(NamedTuple):
    """An event of a request: text that is final, the generated token, or the end."""

    text: str = ""
    token: WrittenToken | None = None  # where a request asks for log-probabilities
    end: End | None = None
    error: BaseException | None = None  # which ends it too
    session: Session | None = None  # at the end, where it is asked for
    prompt_tokens: int = 0  # at the end: tokens of the prompt,
    cached_tokens: int = 0  # how many of them were read before,
    written_tokens: int = 0  # and tokens written
    progress: Progress | None = None  # while the prompt is read, where it is asked for

    @property
    def is_last(self) -> bool:
        return self.end is not None or self.error is not None
