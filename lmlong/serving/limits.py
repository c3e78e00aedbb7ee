"""What one request may ask for, and how much may be held for all of them."""

from dataclasses import dataclass

from lmlong.serving.api_errors import ApiError

MOST_STOPS = 16
LONGEST_STOP = 100
"""Stop strings of a request, and characters of one: after each token they are looked for."""

LONGEST_LIST = 4096
"""Prompts or messages of a request, which are checked while nobody else is answered."""

MOST_ALTERNATIVES = 20
"""The most tokens that are told in the place of each."""


@dataclass(frozen=True)
class Limits:
    """Limits of a server, which protect it from requests that would take all of its memory or time."""

    body: int = 16 << 20
    """Bytes of the body of a request."""
    prompt: int = 4 << 20
    """Bytes of a prompt, of all messages of a chat, or of a text to score; a token has at least one."""
    max_tokens: int = 4096
    """Tokens of a text that is written."""
    choices: int = 16
    """Texts of one request: prompts times `n`."""
    held: int = 256 << 20
    """Bytes of the bodies of all requests that are not answered yet."""
    lag: int = 1 << 20
    """Bytes, about, that a client may leave unread of a stream before its request is ended."""
    aside: int = 64
    """Texts to score that may wait, and chats to render, and uploaded documents."""
    timeout: float = 600.0
    """Seconds of a request, from its first byte to the last of its answer."""


def check_prompt(limits: Limits, text: str, name: str) -> None:
    size = len(text.encode())
    if size > limits.prompt:
        message = f"{name}: {size:,} bytes are more than the {limits.prompt:,} of this server."
        raise ApiError(400, message, name, "context_length_exceeded")
