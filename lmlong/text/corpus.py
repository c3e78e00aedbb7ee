"""Where documents come from: each kind of source in a recipe becomes a stream of documents and a fingerprint."""

import sysconfig
from collections.abc import Callable, Iterable, Iterator
from glob import escape, glob, has_magic
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, NamedTuple

from lmlong import recipe
from lmlong.errors import UsageError, nearest
from lmlong.text.reading import COMPRESSED, Document, file_document, read, text_document

PLAIN = (".txt", ".md", ".py")
RECORDS = {".jsonl": "json", ".parquet": "parquet"}  # suffix -> builder of `datasets`
NOT_STDLIB = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}

Errors = Literal["strict", "replace"]


class Skipped(NamedTuple):
    """A document that is left out, and why."""

    name: str
    reason: str


class Source(NamedTuple):
    """A source of documents that can be read again and again."""

    name: str
    fingerprint: str  # changes when the documents do
    bytes: int | None  # of text, where that is known before reading
    remote: bool  # reading it twice means downloading it twice
    documents: Callable[[], Iterator[Document | Skipped]]


def open_source(options: recipe.Source, errors: Errors) -> Source:
    """Find what a source of a recipe stands for, and fingerprint it."""
    if isinstance(options, recipe.PythonStdlib):
        return _python_stdlib()
    if isinstance(options, recipe.Files):
        return _files(options, errors)
    return _hub(options, errors)


# ---- the standard library


def _python_stdlib() -> Source:
    root = Path(sysconfig.get_path("stdlib"))
    relative = (path.relative_to(root) for path in root.rglob("*.py"))
    names = sorted(path.as_posix() for path in relative if not NOT_STDLIB.intersection(path.parts[:-1]))
    return Source(
        "python-stdlib",
        _fingerprint((name, root / name) for name in names),
        sum((root / name).stat().st_size for name in names),
        False,
        lambda: (_stdlib_document(root, name) for name in names),
    )


def _stdlib_document(root: Path, name: str) -> Document | Skipped:
    """A module; the few that declare another encoding are left out, whatever text.errors says."""
    try:
        return text_document(name, (root / name).read_bytes().decode(), "strict")
    except UnicodeDecodeError:
        return Skipped(name, "not UTF-8")


# ---- files


def _files(options: recipe.Files, errors: Errors) -> Source:
    paths = _expand(options.paths)
    if not any(path.stat().st_size for path in paths):
        raise UsageError(f"{', '.join(map(str, paths[:5]))}: empty, so text.sources has no text. Name a file with text.")

    def documents() -> Iterator[Document | Skipped]:
        for path in paths:
            if _format(path) in RECORDS:
                yield from _file_records(path, options.column, errors)
            else:
                yield file_document(path, errors)

    plain = all(path.suffix not in (*COMPRESSED, *RECORDS) for path in paths)
    return Source(
        f"files {' '.join(options.paths)}",
        _fingerprint(((options.column + "".join(path.suffixes[-2:]), path) for path in paths)),
        sum(path.stat().st_size for path in paths) if plain else None,
        False,
        documents,
    )


def _expand(patterns: list[str]) -> list[Path]:
    """The files that paths, folders and globs name: each once, in the order of the patterns, sorted within one."""
    found: dict[Path, Path] = {}
    for pattern in patterns:
        path = Path(pattern).expanduser()
        if path.is_dir():
            paths = [file for file in path.rglob("*") if file.is_file() and _format(file) in (*PLAIN, *RECORDS)]
        elif path.exists():
            paths = [path]
        elif has_magic(pattern):
            paths = [file for file in map(Path, glob(str(path), recursive=True)) if file.is_file()]
        else:
            raise UsageError(f"{pattern}: no such file or folder. Correct text.sources; see also: {Path.cwd()}.")
        if not paths:
            raise UsageError(f"{pattern}: holds no text. A folder is searched for {_known()}, a glob must match files.")
        for file in sorted(paths):
            found.setdefault(file.resolve(), file)
    return list(found.values())


def _known() -> str:
    return ", ".join((*PLAIN, *RECORDS)) + f" (each also with {' or '.join(COMPRESSED)})"


def _format(path: Path) -> str:
    """The suffix that says how a file is read, under that of its compression."""
    return Path(path.stem).suffix if path.suffix in COMPRESSED else path.suffix


def _file_records(path: Path, column: str, errors: Errors) -> Iterator[Document | Skipped]:
    builder = RECORDS[_format(path)]
    if not path.stat().st_size:
        return iter([Skipped(str(path), "empty")])

    def load() -> Iterable[dict[str, Any]]:
        import datasets

        return datasets.load_dataset(builder, data_files=[escape(str(path.resolve()))], split="train", streaming=True)

    return _records(str(path), load, column, errors)


# ---- records, of files and of the hub


def _records(
    name: str, load: Callable[[], Iterable[dict[str, Any]]], column: str, errors: Errors
) -> Iterator[Document | Skipped]:
    """One document for each record; whatever `datasets` raises becomes an error that names the source."""
    records = _reported(name, load)
    for number, record in enumerate(records):
        place = f"{name}:{number}"
        if column not in record:
            raise UsageError(
                f"{place}: no column '{column}'; there are {', '.join(record)}. Set the source's column in the recipe."
                + nearest(column, record)
            )
        text = record[column]
        if text is None:
            yield Skipped(place, "no text")
        elif isinstance(text, str):
            yield text_document(place, text, errors)
        else:
            raise UsageError(f"{place}: column '{column}' holds {type(text).__name__}, not text. Name another column.")


def _reported(name: str, load: Callable[[], Iterable[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    try:
        yield from load()
    except Exception as error:  # `datasets` raises dozens of kinds, of its own and of the libraries below it
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise UsageError(f"{name}: `datasets` cannot read it ({reason}).") from error


def _hub(options: recipe.Hub, errors: Errors) -> Source:
    def load() -> Iterable[dict[str, Any]]:
        import datasets

        return datasets.load_dataset(
            options.dataset, options.config, split=options.split, streaming=options.streaming
        )

    name = f"hub {options.dataset}"
    parts = [options.dataset, options.config, options.split, options.column, _revision(options)]
    return Source(
        name,
        sha256(repr(parts).encode()).hexdigest(),
        None,
        options.streaming and not Path(options.dataset).is_dir(),
        lambda: _records(name, load, options.column, errors),
    )


def _revision(options: recipe.Hub) -> str:
    """What pins the content of a data set: its files if it is a folder, else the commit that the hub reports.

    Hashing a streamed data set itself would mean downloading all of it only to find that its tokens are cached.
    """
    folder = Path(options.dataset)
    if folder.is_dir():
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        return _fingerprint((str(path.relative_to(folder)), path) for path in files)
    import datasets

    try:
        return str(datasets.load_dataset_builder(options.dataset, options.config).hash)
    except Exception as error:  # as in _reported
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise UsageError(f"hub {options.dataset}: `datasets` cannot find it ({reason}).") from error


def _fingerprint(files: Iterable[tuple[str, Path]]) -> str:
    """A hash of labels and contents; compressed files are read as they lie."""
    total = sha256()
    for label, path in files:
        content = sha256()
        for chunk in read(path, decompress=False):
            content.update(chunk)
        total.update(f"{len(label)} {label} ".encode() + content.digest())
    return total.hexdigest()
