"""Prompts: one from a stream of bytes of any size, or many from a file."""

import codecs
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from lmlong.errors import UsageError
from lmlong.io.files import parse_json

CHUNK = 1 << 20


class Prompt(NamedTuple):
    """One of many prompts, with the content of its line."""

    text: str
    line: dict[str, Any]


def pieces_of(file: BinaryIO, name: str) -> Iterator[str]:
    """Iterate over a text in pieces of whole characters, read on demand."""
    decoder, read = codecs.getincrementaldecoder("utf-8")(), 0
    while True:
        data = file.read(CHUNK)
        pending = len(decoder.getstate()[0])
        try:
            piece = decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            place = read - pending + error.start
            raise UsageError(f"{name}: not UTF-8 at byte {place}. Convert the prompt to UTF-8.") from None
        read += len(data)
        if piece:
            yield piece
        if not data:
            return


def many(path: Path) -> list[Prompt]:
    """Return the prompts of a .jsonl file: on each line a string, or an object with a `prompt`."""
    try:
        text = path.read_bytes().decode("utf-8").removeprefix("\ufeff")  # what some programs put before UTF-8
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}). Name a file of prompts.") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 at byte {error.start}. Convert it to UTF-8.") from None
    # a line of JSON may hold every other character that Python would end a line at
    lines = enumerate(text.split("\n"), 1)
    return [_prompt(line, f"{path}:{number}") for number, line in lines if line.strip(" \t\r")]


def _prompt(line: str, place: str) -> Prompt:
    try:
        found = parse_json(line)
    except ValueError:
        found = None
    entry = {"prompt": found} if isinstance(found, str) else found
    if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str):
        raise UsageError(
            f'{place}: no prompt. Write a string, or an object such as {{"prompt": "Once"}}, on each line.'
        )
    return Prompt(entry["prompt"], entry)
