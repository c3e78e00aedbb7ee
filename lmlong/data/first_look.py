"""A first look at the text of a recipe: wrong paths, columns and encodings are told before anything slow is imported or
read. What it does not see in its time is told when the text is read."""

import json
import time
from pathlib import Path

from lmlong import recipe
from lmlong.data.reading import Errors, file_document, read
from lmlong.data.sources import RECORDS, _expand, _format
from lmlong.errors import UsageError, nearest

SECONDS = 0.5
"""The time that is taken for it, in all."""

LINE = 1 << 20
"""Longest first line of a .jsonl file that is looked at, in bytes."""


def check(text: recipe.Text) -> None:
    """Refuse sources whose files are missing, have no such column, or are not in UTF-8."""
    end = time.monotonic() + SECONDS
    for source in (*text.sources, *text.validation.sources):
        if isinstance(source, recipe.Files):
            for path in _expand(source.paths):
                if time.monotonic() > end:
                    return
                _check_file(path, source.column, text.errors, end)


def _check_file(path: Path, column: str, errors: Errors, end: float) -> None:
    if _format(path) not in RECORDS:
        for _ in file_document(path, errors).pieces():
            if time.monotonic() > end:
                return
        return
    there = _columns(path)
    if there is not None and column not in there:
        raise UsageError(f"{path}: no column '{column}', only {', '.join(there)}. Set column.{nearest(column, there)}")


def _columns(path: Path) -> list[str] | None:
    """Return the columns of the first record of a file; None where they cannot be told at once."""
    if path.suffix == ".parquet":
        return _parquet_columns(path)
    if _format(path) != ".jsonl":
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
