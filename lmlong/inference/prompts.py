"""Prompts: one from a byte stream of any size, or many from a file."""

import codecs
from codecs import BOM_UTF8
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from lmlong.data.encoding import UTF8, marked
from lmlong.errors import UsageError
from lmlong.io.files import parse_json

CHUNK = 1 << 20


class Prompt(NamedTuple):
    """One of many prompts, with the contents of its line."""

    text: str
    line: dict[str, Any]


def pieces_of(file: BinaryIO, name: str) -> Iterator[str]:
    """Iterate over a text in pieces of whole characters, read on demand; UTF-8, or the encoding of a byte order
    mark."""
    data, read = file.read(CHUNK), 0
    encoding = marked(data) or UTF8
    if encoding == "utf-8-sig":
        encoding, read, data = UTF8, len(BOM_UTF8), data[len(BOM_UTF8) :] or file.read(CHUNK)
    decoder = codecs.getincrementaldecoder(encoding)()
    while True:
        pending = len(decoder.getstate()[0])
        try:
            piece = decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            offset, shown = read - pending + error.start, "UTF-8" if encoding == UTF8 else encoding
            raise UsageError(f"{name}: not {shown} at byte {offset}. Convert the prompt to UTF-8.") from None
        read += len(data)
        if piece:
            yield piece
        if not data:
            return
        data = file.read(CHUNK)


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
