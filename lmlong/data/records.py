"""Records of files and of data sets of the hub, or saved on disk, all read through `datasets`."""

import sys
from collections.abc import Callable, Iterable, Iterator
from glob import escape
from pathlib import Path
from types import ModuleType
from typing import Any

from lmlong import recipe
from lmlong.data.reading import Document, Errors, Skipped, text_document
from lmlong.errors import UsageError, nearest

Records = Iterable[dict[str, Any]]


def file_records(path: Path, builder: str, tabs: bool = False, encoding: str = "auto") -> Records:
    """Return the records of one file."""
    options: dict[str, Any] = {"sep": "\t"} if tabs else {}
    if encoding != "auto" and builder in ("json", "csv"):
        options["encoding"] = encoding
    files = [escape(str(path.resolve()))]
    return _library().load_dataset(builder, data_files=files, split="train", streaming=True, **options)


def hub_records(options: recipe.Hub) -> Records:
    """Return the records of a data set of the hub, of a folder in its format, or of one that `save_to_disk` wrote."""
    if is_saved(Path(options.dataset)):
        return _saved(options)
    return _library().load_dataset(options.dataset, options.config, split=options.split, streaming=options.streaming)


def is_saved(folder: Path) -> bool:
    """Return whether `save_to_disk` of `datasets` wrote a folder: one data set, or one for each split."""
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def _saved(options: recipe.Hub) -> Records:
    datasets = _library()
    found = datasets.load_from_disk(options.dataset)
    splits = dict(found) if isinstance(found, datasets.DatasetDict) else {str(found.split or options.split): found}
    if options.split not in splits:
        raise ValueError(f"no split {options.split!r}, only {', '.join(splits)}")
    return splits[options.split]


def hub_revision(options: recipe.Hub) -> str:
    """Return the hub's revision of a data set, without reading its records."""
    try:
        return str(_library().load_dataset_builder(options.dataset, options.config).hash)
    except Exception as error:  # `datasets` raises dozens of types, its own and those of the libraries below it
        raise _unreadable(f"hub {options.dataset}", error) from error


def documents_of(name: str, load: Callable[[], Records], column: str, errors: Errors) -> Iterator[Document | Skipped]:
    """Iterate over the records as documents."""
    for number, record in enumerate(_reported(name, load)):
        place = f"{name}:{number}"
        if column not in record:
            there = ", ".join(record)
            raise UsageError(f"{place}: no column '{column}', only {there}. Set column.{nearest(column, record)}")
        text = record[column]
        if text is None:
            yield Skipped(place, "no text")
        elif isinstance(text, str):
            others = {key: value for key, value in record.items() if key != column}
            yield text_document(place, text, errors, others)
        else:
            raise UsageError(f"{place}: column '{column}' holds {type(text).__name__}, not text. Name another column.")


def _library() -> ModuleType:
    """Import `datasets`, only when needed because that takes a second, without progress bars off a terminal."""
    import datasets

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    return datasets


def _reported(name: str, load: Callable[[], Records]) -> Iterator[dict[str, Any]]:
    try:
        yield from load()
    except Exception as error:  # as in hub_revision
        raise _unreadable(name, error) from error


def _unreadable(name: str, error: Exception) -> UsageError:
    reason = str(error).strip().split("\n")[0] or type(error).__name__
    return UsageError(f"{name}: `datasets` cannot read it ({reason}). Check the source's name, config and split.")
