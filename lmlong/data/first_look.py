"""A first look at the text of a recipe: wrong paths, columns and encodings are told before anything slow is imported or
read. What it does not see in its time is told when the text is read."""

import json
import time
from functools import partial
from pathlib import Path

from lmlong import recipe
from lmlong.data import sources
from lmlong.data.encoding import find_encoding
from lmlong.data.files import builder_of, find_files, kind
from lmlong.data.reading import read
from lmlong.errors import UsageError, nearest

SECONDS = 0.5
"""The time that is taken for it, in all."""

LARGE = 1 << 22
"""Size of a plain file in bytes from which its encoding is not looked at."""

LINE = 1 << 20
"""Longest first line of a .jsonl file that is looked at, in bytes."""


def check(text: recipe.Text) -> None:
    """Refuse sources whose files are missing, have no such column, or are in another encoding than is told."""
    end = time.monotonic() + SECONDS
    for source in (*text.sources, *text.validation.sources):
        if isinstance(source, recipe.Files):
            for path in find_files(source.paths, source.column).files:
                if time.monotonic() > end:
                    return
                if builder_of(path):
                    _check_column(path, source.column)
                elif text.errors == "strict" and not _decodes(path, text.encoding):
                    sources.check(sources.open_inputs(text))  # which names all such files


def _decodes(path: Path, encoding: str) -> bool:
    try:
        if path.stat().st_size < LARGE:
            find_encoding(partial(read, path), str(path), encoding)
        return True
    except UsageError:
        return False


def _check_column(path: Path, column: str) -> None:
    there = _columns(path)
    if there is not None and column not in there:
        raise UsageError(f"{path}: no column '{column}', only {', '.join(there)}. Set column.{nearest(column, there)}")


def _columns(path: Path) -> list[str] | None:
    """Return the columns of the first record of a file; None where they cannot be told at once."""
    if kind(path) == ".parquet":
        return _parquet_columns(path)
    if kind(path) not in (".jsonl", ".ndjson"):
        return None
    line = b""
    for chunk in read(path):
        line += chunk
        if b"\n" in line or len(line) > LINE:
            break
    try:
        record = json.loads(line.split(b"\n", 1)[0])
    except (ValueError, RecursionError):
        return None
    return list(record) if isinstance(record, dict) else None


def _parquet_columns(path: Path) -> list[str] | None:
    from pyarrow import ArrowException
    from pyarrow.parquet import read_schema

    try:
        return read_schema(path).names
    except (ArrowException, OSError):
        return None  # told in the words of `datasets`, which reads it
