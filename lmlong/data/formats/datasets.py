"""Records of files and of Hugging Face data sets, read with the library `datasets`."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from glob import escape
from pathlib import Path
from types import ModuleType
from typing import Any

from lmlong import recipe
from lmlong.data.document import Document, Errors, ReadOptions, Skipped
from lmlong.data.formats.compression import read_bytes, suffix_of
from lmlong.errors import UsageError, nearest

RecordStream = Iterable[dict[str, Any]]

SAVED_DATASET = ("state.json", "dataset_dict.json")
"""Files of which `save_to_disk` of `datasets` writes one: for a data set, or for several splits."""

LONGEST_LINE = 1 << 20
"""Bytes of the first line of a .jsonl up to which it is checked."""

BINARY = ("parquet", "arrow")
"""Builders of files that have no encoding."""


def records(builder: str, path: Path, options: ReadOptions) -> Iterator[Document | Skipped]:
    """Iterate over the records of a file, of which one column is text; `builder` is the one of `datasets`."""
    more: dict[str, Any] = {"sep": "\t"} if suffix_of(path) == ".tsv" else {}
    if options.encoding != "auto" and builder not in BINARY:
        more["encoding"] = options.encoding
    files = [escape(str(path.absolute()))]

    def load() -> RecordStream:
        return _library().load_dataset(builder, data_files=files, split="train", streaming=True, **more)

    return documents_of_records(str(path), load, options.column, options.errors)


def first_line_has_column(path: Path, options: ReadOptions) -> bool:
    """Return whether the first record of a .jsonl has the column; True if its first line is not a record."""
    line = b""
    for chunk in read_bytes(path):
        line += chunk
        if b"\n" in line or len(line) > LONGEST_LINE:
            break
    try:
        record = json.loads(line.split(b"\n", 1)[0])
    except (ValueError, RecursionError):  # `datasets` reports it
        return True
    return not isinstance(record, dict) or options.column in record


def schema_has_column(path: Path, options: ReadOptions) -> bool:
    """Return whether a .parquet has the column; True if it cannot be read."""
    from pyarrow import ArrowException
    from pyarrow.parquet import read_schema

    try:
        return options.column in read_schema(path).names
    except (ArrowException, OSError):  # `datasets` reports it
        return True


def hub_records(options: recipe.Hub) -> RecordStream:
    """Return the records of a data set on the hub, in a folder of its format, or in a folder of `save_to_disk`."""
    folder, datasets = Path(options.dataset), _library()
    if not any((folder / name).is_file() for name in SAVED_DATASET):
        return datasets.load_dataset(options.dataset, options.config, split=options.split, streaming=options.streaming)
    saved = datasets.load_from_disk(options.dataset)
    splits = dict(saved) if isinstance(saved, datasets.DatasetDict) else {str(saved.split or options.split): saved}
    if options.split not in splits:
        raise ValueError(f"no split {options.split!r}, only {', '.join(splits)}")
    return splits[options.split]


def hub_revision(options: recipe.Hub) -> str:
    """Return the hub's revision of a data set, without reading its records."""
    try:
        return str(_library().load_dataset_builder(options.dataset, options.config).hash)
    except Exception as error:  # `datasets` raises dozens of types, its own and those of the libraries below it
        raise _unreadable(f"hub {options.dataset}", error) from error


def documents_of_records(
    name: str, load: Callable[[], RecordStream], column: str, errors: Errors
) -> Iterator[Document | Skipped]:
    """Iterate over records as documents."""
    for number, record in enumerate(_reported(name, load)):
        title = f"{name}:{number}"
        if column not in record:
            hint = nearest(column, record)
            raise UsageError(f"{title}: no column '{column}', only {', '.join(record)}. Set column.{hint}")
        text = record[column]
        if text is None:
            yield Skipped(title, "no text")
        elif isinstance(text, str):
            fields = {key: value for key, value in record.items() if key != column}
            yield Document.of_text(title, text, errors, fields)
        else:
            raise UsageError(f"{title}: column '{column}' holds {type(text).__name__}, not text. Name another column.")


def _library() -> ModuleType:
    """Import `datasets`, which takes a second. It shows progress bars only on a terminal."""
    import datasets

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    return datasets


def _reported(name: str, load: Callable[[], RecordStream]) -> Iterator[dict[str, Any]]:
    try:
        yield from load()
    except Exception as error:  # as in hub_revision
        raise _unreadable(name, error) from error


def _unreadable(name: str, error: Exception) -> UsageError:
    reason = str(error).strip().split("\n")[0] or type(error).__name__
    return UsageError(f"{name}: `datasets` cannot read it ({reason}). Check the source's name, config and split.")
