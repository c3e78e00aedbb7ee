"""Standard input, output and error of a command, whatever they are connected to."""

import io
import os
import sys
from typing import Any, TextIO

STDOUT = "standard output"


class Output(io.FileIO):
    """Standard output, which the errors of writing to it name."""

    def write(self, data: Any) -> Any:
        try:
            return super().write(data)
        except OSError as error:
            error.filename = STDOUT
            raise


class Messages(io.FileIO):
    """Standard error: what cannot be written is dropped, for the work must not end with the messages about it."""

    def write(self, data: Any) -> Any:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def prepare() -> None:
    """Let the streams of this process fail as above, in UTF-8. One that was closed before it began leads to nowhere: a
    file would get its number, and be written to in its place."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115
    sys.stdout = _opened(sys.stdout, Output, "replace")
    sys.stderr = _opened(sys.stderr, Messages, "backslashreplace")


def discard_output() -> None:
    """Let standard output lead to nowhere: Python writes to it once more while it ends, and would complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _opened(stream: TextIO | None, kind: type[io.FileIO], errors: str) -> TextIO:
    if stream is None:
        return open(os.devnull, "w", encoding="utf-8")
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    buffer: Any = stream.buffer
    is_own = stream in (sys.__stdout__, sys.__stderr__)  # and not one that a test or a notebook has put there
    if not is_own or not isinstance(getattr(buffer, "raw", buffer), io.FileIO):  # Windows' console is no file
        stream.reconfigure(encoding="utf-8", errors=errors)
        return stream
    raw: Any = kind(stream.fileno(), "wb", closefd=False)
    return io.TextIOWrapper(
        raw if stream.write_through else io.BufferedWriter(raw),
        encoding="utf-8",
        errors=errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
