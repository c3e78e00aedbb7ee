"""Sources of documents: each kind of source in a recipe becomes a stream of documents and a fingerprint."""

import sysconfig
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from glob import glob, has_magic
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from lmlong import recipe
from lmlong.data.reading import COMPRESSED, Document, Errors, Skipped, file_document, read, text_document
from lmlong.data.records import documents_of, file_records, hub_records, hub_revision
from lmlong.errors import UsageError

PLAIN = (".txt", ".md", ".py")
RECORDS = {".jsonl": "json", ".parquet": "parquet"}  # suffix -> builder of `datasets`
NOT_STDLIB = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


class Source(NamedTuple):
    """A source of documents that can be read again and again."""

    name: str
    fingerprint: str  # changes when the documents do
    bytes: int | None  # of text; None where that is not known before reading
    remote: bool  # reading it twice means downloading it twice
    documents: Callable[[], Iterator[Document | Skipped]]


def open_source(options: recipe.Source, errors: Errors) -> Source:
    """Open a source of a recipe, and fingerprint it."""
    if isinstance(options, recipe.PythonStdlib):
        return _python_stdlib()
    if isinstance(options, recipe.Files):
        return _files(options, errors)
    return _hub(options, errors)


def _python_stdlib() -> Source:
    """Return the standard library, its documents named by relative paths, so that it is one corpus on every machine."""
    root = Path(sysconfig.get_path("stdlib"))
    below = (path.relative_to(root) for path in root.rglob("*.py"))
    names = sorted(path.as_posix() for path in below if not NOT_STDLIB.intersection(path.parts[:-1]))
    return Source(
        "python-stdlib",
        _fingerprint((name, root / name) for name in names),
        sum((root / name).stat().st_size for name in names),
        False,
        lambda: (_stdlib_document(root, name) for name in names),
    )


def _stdlib_document(root: Path, name: str) -> Document | Skipped:
    """Return a module; the few that declare another encoding are left out, whatever text.errors says."""
    try:
        return text_document(name, (root / name).read_bytes().decode(), "strict")
    except UnicodeDecodeError:
        return Skipped(name, "not UTF-8", (root / name).stat().st_size)


def _files(options: recipe.Files, errors: Errors) -> Source:
    paths = _expand(options.paths)
    if not any(path.stat().st_size for path in paths):
        raise UsageError(f"{', '.join(map(str, paths[:5]))}: empty. Add text, or name other paths in text.sources.")

    def documents() -> Iterator[Document | Skipped]:
        for path in paths:
            if not path.stat().st_size:
                yield Skipped(str(path), "empty")
            elif builder := RECORDS.get(_format(path)):
                yield from documents_of(str(path), partial(file_records, path, builder), options.column, errors)
            else:
                yield file_document(path, errors)

    plain = all(path.suffix not in (*COMPRESSED, *RECORDS) for path in paths)
    return Source(
        f"files {' '.join(options.paths)}",
        _fingerprint((f"{options.column} {_format(path)} {path.suffix}", path) for path in paths),
        sum(path.stat().st_size for path in paths) if plain else None,
        False,
        documents,
    )


def _expand(patterns: list[str]) -> list[Path]:
    """Return the files that paths, folders and globs match: each once, in the order of the patterns, sorted within."""
    found: dict[Path, Path] = {}
    for pattern in patterns:
        path = Path(pattern).expanduser()
        if path.is_dir():
            paths = [file for file in path.rglob("*") if _is_text(file, path)]
        elif path.exists():
            paths = [path]
        elif has_magic(pattern):
            paths = [file for file in map(Path, glob(str(path), recursive=True)) if file.is_file()]
        else:
            raise UsageError(f"{pattern}: no such file or folder (seen from {Path.cwd()}). Correct text.sources.")
        if not paths:
            known = ", ".join((*PLAIN, *RECORDS))
            raise UsageError(
                f"{pattern}: matches no file. A folder is searched for {known}, each also compressed as "
                f"{' or '.join(COMPRESSED)}; other files must be named. Correct the paths of text.sources."
            )
        for file in sorted(paths):
            found.setdefault(file.resolve(), file)
    return list(found.values())


def _is_text(file: Path, folder: Path) -> bool:
    """Return whether a file within a folder is read; hidden ones are not, as with globs."""
    hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
    return not hidden and _format(file) in (*PLAIN, *RECORDS) and file.is_file()


def _format(path: Path) -> str:
    """Return the suffix that says how a file is read, without that of its compression."""
    return Path(path.stem).suffix if path.suffix in COMPRESSED else path.suffix


def _hub(options: recipe.Hub, errors: Errors) -> Source:
    name, folder = f"hub {options.dataset}", Path(options.dataset)
    # Hashing a streamed data set would mean downloading all of it only to find that its tokens are cached.
    revision = _folder_fingerprint(folder) if folder.is_dir() else hub_revision(options)
    parts = [options.dataset, options.config, options.split, options.column, revision]
    return Source(
        name,
        sha256(repr(parts).encode()).hexdigest(),
        None,
        options.streaming and not folder.is_dir(),
        lambda: documents_of(name, lambda: hub_records(options), options.column, errors),
    )


def _folder_fingerprint(folder: Path) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return _fingerprint((path.relative_to(folder).as_posix(), path) for path in files)


def _fingerprint(files: Iterable[tuple[str, Path]]) -> str:
    """Return a hash of labels and contents; compressed files are hashed as stored."""
    total = sha256()
    for label, path in files:
        content = sha256()
        for chunk in read(path, decompress=False):
            content.update(chunk)
        total.update(f"{len(label)} {label} ".encode() + content.digest())
    return total.hexdigest()


class Input(NamedTuple):
    """A source, its share of the training text, and the share of it that is held out for validation."""

    source: Source
    weight: float
    held_out: float  # share of its text


def open_inputs(text: recipe.Text) -> list[Input]:
    """Return the sources to train on, then those to validate on."""
    held_out = 0.0 if text.validation.sources else text.validation.fraction
    inputs = [Input(open_source(options, text.errors), options.weight, held_out) for options in text.sources]
    return inputs + [Input(open_source(options, text.errors), 0.0, 1.0) for options in text.validation.sources]
