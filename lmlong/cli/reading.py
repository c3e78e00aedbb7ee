"""The texts that commands read: a file or standard input in pieces, with progress, or many prompts."""

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from lmlong.data.encoding import UTF8, EncodingError, decode, marked
from lmlong.data.formats.table import is_utf8, text_file
from lmlong.errors import UsageError
from lmlong.io.files import parse_json
from lmlong.report.progress import Progress

CHUNK = 1 << 20


def pieces(file: Path | None) -> Iterator[str]:
    """Iterate over the text of a file, in any format that training reads, or of standard input."""
    if file and file.is_file():
        document = text_file(file)
        size = file.stat().st_size if is_utf8(file, document) else None
        yield from with_progress(document.pieces(), document.name, size)
        return
    name = str(file or "standard input")
    try:
        with file.open("rb") if file else nullcontext(sys.stdin.buffer) as source:
            yield from with_progress(pieces_of(source, name), name, None)
    except OSError as error:
        raise UsageError(f"{name}: cannot be read ({error.strerror}). Name a file with the text to continue.") from None


def with_progress(text: Iterator[str], name: str, size: int | None) -> Iterator[str]:
    """Iterate over a text, and show how much of its `size` in bytes was read, if that is known."""
    with Progress(f"reading {name}", size) as progress:
        for piece in text:
            yield piece
            progress.update(len(piece.encode()))


class Prompt(NamedTuple):
    """One of many prompts, with the contents of its line."""

    text: str
    line: dict[str, Any]


def pieces_of(file: BinaryIO, name: str) -> Iterator[str]:
    """Iterate over a text in pieces of whole characters, read on demand; UTF-8, or the encoding of a byte order
    mark."""
    first = file.read(CHUNK)
    chunks = chain([first], iter(partial(file.read, CHUNK), b""))
    try:
        yield from (piece.text for piece in decode(chunks, name, "strict", marked(first) or UTF8))
    except EncodingError as error:
        raise UsageError(f"{name}: not {error.encoding} at byte {error.byte}. Convert the prompt to UTF-8.") from None


def many(path: Path) -> list[Prompt]:
    """Return the prompts of a .jsonl file: each line is a string, or an object with a `prompt`."""
    try:
        with path.open("rb") as file:
            text = "".join(pieces_of(file, str(path)))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}). Name a file of prompts.") from None
    # not splitlines: JSON may contain the other line separators of Python
    lines = enumerate(text.split("\n"), 1)
    return [_prompt(line, f"{path}:{number}") for number, line in lines if line.strip(" \t\r")]


def _prompt(line: str, where: str) -> Prompt:
    try:
        value = parse_json(line)
    except ValueError:
        value = None
    entry = {"prompt": value} if isinstance(value, str) else value
    if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str):
        raise UsageError(
            f'{where}: not a prompt. Write a string, or an object such as {{"prompt": "Once"}}, on each line.'
        )
    return Prompt(entry["prompt"], entry)
