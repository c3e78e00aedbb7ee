"""The settings of a server. Those with a help text are options of `lmlong serve`."""

from dataclasses import dataclass, field
from typing import Any


def option(default: Any, unit: str, help: str, least: float = 1) -> Any:
    """Return a field that is an option of the command line, with its unit and its lowest value."""
    return field(default=default, metadata={"unit": unit, "help": help, "least": least})


@dataclass(frozen=True)
class Settings:
    """Limits that protect a server from requests that would take all of its memory or time."""

    rows: int = option(64, "", "Maximum number of texts generated at the same time.")
    memory: int = option(1 << 30, "bytes", "Memory for states of texts, which are then not read again.", 0)
    disk: int = option(4 << 30, "bytes", "Disk space for states of sessions.", 0)
    max_tokens: int = option(4096, "tokens", "Maximum number of tokens generated per text.")
    max_prompt: int = option(4 << 20, "bytes", "Maximum bytes of a prompt. A request body may have four times as many.")
    timeout: float = option(600.0, "seconds", "Maximum seconds per request.", 0.001)
    grace: float = option(10.0, "seconds", "Seconds to finish requests after a signal.", 0)
    waiting: int = 1024
    """Texts that may wait for a place."""
    max_sessions: int = 20_000
    max_session_bytes: int = 10 << 30
    """Bytes of the files of sessions and of uploaded states."""
    max_choices: int = 16
    """Texts per request."""
    max_body: int = 16 << 20
    """Bytes of the body of a request."""
    held: int = 256 << 20
    """Bytes of the bodies of all requests that are not answered yet."""
    lag: int = 1 << 20
    """Approximate bytes that a client may leave unread of a stream before its request is ended."""
    jobs: int = 64
    """Texts to score, chats to render and documents to convert that may wait."""


DEFAULT_SETTINGS = Settings()
