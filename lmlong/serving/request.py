"""What is asked of the engine, and what it tells while it writes."""

from dataclasses import dataclass, field
from typing import NamedTuple

from lmlong.inference.generation import End
from lmlong.inference.session import Session
from lmlong.model.sampling_options import MAX_TOKENS, Sampling


@dataclass(frozen=True)
class Request:
    """A text to read, and how to go on from it."""

    prompt: str | tuple[int, ...]
    """A text; or the tokens of the beginning of a document, which are read as they are."""
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int | None = MAX_TOKENS
    """None: until the model ends the document."""
    stop: tuple[str, ...] = ()
    start: Session | None = None
    """What was read before the prompt; None: nothing."""
    draws: tuple[int, ...] = (0,)
    """Numbers that the random draws depend on beside the seed: several texts of one prompt differ in them."""
    alternatives: int | None = None
    """Of how many of the likeliest tokens the log-probability is told, beside that of the token; None: of none."""
    owner: str = ""
    """Whose beginnings of texts may be used again."""
    keep_session: bool = False
    """Whether the session after exactly the text that was written is told at the end."""


class TokenLikelihood(NamedTuple):
    """A token and its log-probability, before any sampling option."""

    token: int
    log_probability: float


class WrittenToken(NamedTuple):
    """A token that was written, and the likeliest ones in its place."""

    token: int
    log_probability: float
    alternatives: tuple[TokenLikelihood, ...]


class Event(NamedTuple):
    """What happened to a request: text that is now certain, the token that was written, or the end."""

    text: str = ""
    token: WrittenToken | None = None  # where a request asks for log-probabilities
    end: End | None = None
    error: BaseException | None = None  # which ends it too
    session: Session | None = None  # at the end, where it is asked for
    prompt_tokens: int = 0  # at the end: tokens of the prompt,
    cached_tokens: int = 0  # how many of them were read before,
    written_tokens: int = 0  # and tokens written

    @property
    def is_last(self) -> bool:
        return self.end is not None or self.error is not None
