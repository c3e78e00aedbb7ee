"""`lmlong generate --chat`: a conversation in a terminal."""

import sys
from collections.abc import Iterator
from contextlib import suppress

from lmlong.cli.reading import pieces
from lmlong.inference.chat import Conversation
from lmlong.model.sampling_options import Sampling


def talk(conversation: Conversation, prompt: str | None, sampling: Sampling, max_tokens: int | None) -> None:
    """Answer the given message, or each line of a terminal until end of file."""
    for message in _messages(prompt):
        for piece in conversation.say(message, sampling, max_tokens):
            print(piece, end="", flush=True)
        print()


def _messages(prompt: str | None) -> Iterator[str]:
    if prompt is not None:
        yield prompt
    elif sys.stdin is None or not sys.stdin.isatty():
        yield "".join(pieces(None))
    else:
        yield from _lines()


def _lines() -> Iterator[str]:
    """Iterate over the lines of a terminal, with line editing."""
    with suppress(ImportError):  # Windows has none
        import readline  # noqa: F401  input() uses it once it is imported
    while True:
        try:
            line = input("> ")
        except EOFError:
            print()
            return
        if line.strip():
            yield line
