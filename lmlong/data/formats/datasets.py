"""Records of files and of Hugging Face data sets, read with the library `datasets`."""

import json
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from glob import escape
from pathlib import Path
from types import ModuleType
from typing import Any

from lmlong import recipe
from lmlong.data.document import Document, Errors, Skipped, text_document
from lmlong.data.formats.base import FileFormat, ReadOptions, suffix_of
from lmlong.data.formats.compression import read_bytes
from lmlong.errors import UsageError, nearest

RecordStream = Iterable[dict[str, Any]]

SAVED_DATASET = ("state.json", "dataset_dict.json")
"""Files of which `save_to_disk` of `datasets` writes one: for a data set, or for several splits."""

LONGEST_LINE = 1 << 20
"""Bytes of the first line of a .jsonl up to which `quick_check` reads it."""


class Records(FileFormat):
    """A file of records, of which one column is text."""

    def __init__(self, builder: str, is_text: bool = True, only_if_named: bool = False):
        """`builder` is the one of `datasets`. A folder skips `only_if_named` files, which need not hold records."""
        self.builder, self.is_text, self._only_if_named = builder, is_text, only_if_named

    def skip_reason(self, path: Path, column: str) -> str | None:
        if self.builder == "arrow" and path.name.startswith("cache-"):
            return "a cache of `datasets`"
        return f"may hold no records: name it to read its column '{column}'" if self._only_if_named else None

    def check(self, path: Path, options: ReadOptions) -> str:
        next(self.documents(path, options), None)
        return options.encoding

    def quick_check(self, path: Path, options: ReadOptions) -> bool:
        columns = self._columns(path)
        if columns is not None and options.column not in columns:
            raise _missing_column(str(path), options.column, columns)
        return True

    def documents(self, path: Path, options: ReadOptions) -> Iterator[Document | Skipped]:
        return documents_of_records(
            str(path), lambda: self._records(path, options.encoding), options.column, options.errors
        )

    def fingerprint(self, path: Path, options: ReadOptions) -> str:
        return f"{super().fingerprint(path, options)} as {self.builder} {options.encoding}"

    def _records(self, path: Path, encoding: str) -> RecordStream:
        options: dict[str, Any] = {"sep": "\t"} if suffix_of(path) == ".tsv" else {}
        if encoding != "auto" and self.is_text:
            options["encoding"] = encoding
        files = [escape(str(path.absolute()))]
        return _library().load_dataset(self.builder, data_files=files, split="train", streaming=True, **options)

    def _columns(self, path: Path) -> list[str] | None:
        """Return the columns of the first record of a .parquet or .jsonl; None if a quick look does not show them."""
        if self.builder == "parquet":
            return _parquet_columns(path)
        if self.builder != "json" or self._only_if_named:
            return None
        line = b""
        for chunk in read_bytes(path):
            line += chunk
            if b"\n" in line or len(line) > LONGEST_LINE:
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
        return None  # `datasets` reports it


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
            raise _missing_column(title, column, record)
        text = record[column]
        if text is None:
            yield Skipped(title, "no text")
        elif isinstance(text, str):
            fields = {key: value for key, value in record.items() if key != column}
            yield text_document(title, text, errors, fields)
        else:
            raise UsageError(f"{title}: column '{column}' holds {type(text).__name__}, not text. Name another column.")


def _missing_column(name: str, column: str, columns: Collection[str]) -> UsageError:
    hint = nearest(column, columns)
    return UsageError(f"{name}: no column '{column}', only {', '.join(columns)}. Set column.{hint}")


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
