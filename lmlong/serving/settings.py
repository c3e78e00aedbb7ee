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
    waiting: int = option(1024, "", "Maximum number of queued texts.")
    memory: int = option(1 << 30, "bytes", "Memory for states of texts, which are then not read again.", 0)
    disk: int = option(4 << 30, "bytes", "Disk space for states of sessions.", 0)
    max_sessions: int = option(20_000, "", "Maximum number of sessions.")
    max_session_bytes: int = option(10 << 30, "bytes", "Maximum bytes of session files and uploaded states.")
    max_tokens: int = option(4096, "tokens", "Maximum number of tokens generated per text.")
    max_prompt: int = option(4 << 20, "bytes", "Maximum bytes of a prompt.")
    max_body: int = option(16 << 20, "bytes", "Maximum bytes of a request body.")
    max_choices: int = option(16, "", "Maximum number of texts per request.")
    timeout: float = option(600.0, "seconds", "Maximum seconds per request.", 0.001)
    grace: float = option(10.0, "seconds", "Seconds to finish requests after a signal.", 0)
    held: int = 256 << 20
    """Bytes of the bodies of all requests that are not answered yet."""
    lag: int = 1 << 20
    """Approximate bytes that a client may leave unread of a stream before its request is ended."""
    jobs: int = 64
    """Texts to score, chats to render and documents to convert that may wait."""


DEFAULT_SETTINGS = Settings()
