"""Sources of documents: a stream of documents and a fingerprint for each kind of source in a recipe."""

import os
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from lmlong import recipe
from lmlong.data.document import Document, Errors, ReadOptions, Skipped, file_fields
from lmlong.data.encoding import EncodingError
from lmlong.data.formats.compression import is_compressed, read_bytes
from lmlong.data.formats.datasets import documents_of_records, hub_records, hub_revision
from lmlong.data.formats.table import format_of
from lmlong.data.source_files import find_files, refuse
from lmlong.errors import UsageError
from lmlong.recipe.paths import is_on_hub

NOT_STDLIB = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "encodings"}
"""Folders of the standard library that are skipped; most of `encodings` is tables that are near-copies of each
other."""

QUICK_SECONDS = 0.5
"""The time limit of `check_quickly`."""


class Source(NamedTuple):
    """A source of documents that can be read again and again."""

    name: str
    fingerprint: str  # changes when the documents do
    bytes: int | None  # of text; None if unknown before reading
    remote: bool  # whether reading it again downloads it again
    documents: Callable[[], Iterator[Document | Skipped]]
    left_out: Sequence[Skipped] = ()  # files that a folder or glob skips
    mistakes: Callable[[], list[str]] = list
    """Returns a message for each file that cannot be read."""
    weight: float = 1.0  # in the training text
    held_out: float = 0.0  # the share of its text that is held out for validation
    errors: Errors = "strict"


class Checked(NamedTuple):
    """The files of a source that cannot be read."""

    skipped: dict[Path, str]  # why files that were not named cannot be decoded
    mistakes: list[str]  # in all others


def open_source(options: recipe.Source, errors: Errors, encoding: str = "auto") -> Source:
    """Open a source of a recipe, and fingerprint it."""
    if isinstance(options, recipe.PythonStdlib):
        return _python_stdlib()
    if isinstance(options, recipe.Files):
        return _files(options, errors, encoding)
    return _hub(options, errors)


def _python_stdlib() -> Source:
    """Return the standard library. Documents have relative names, so that every machine has the same corpus."""
    root = Path(sysconfig.get_path("stdlib"))
    names = sorted(_stdlib_names(root))
    return Source(
        "python-stdlib",
        _fingerprint((name, root / name) for name in names),
        sum((root / name).stat().st_size for name in names),
        False,
        lambda: (_stdlib_document(root, name) for name in names),
    )


def _stdlib_names(root: Path) -> Iterator[str]:
    """Yield the names of its modules, except the modules of installed packages, which may change."""
    for folder, below, files in os.walk(root):
        below[:] = [name for name in below if name not in NOT_STDLIB]
        here = Path(folder).relative_to(root)
        yield from ((here / name).as_posix() for name in files if name.endswith(".py"))


def _stdlib_document(root: Path, name: str) -> Document | Skipped:
    """Return a module. The few that are not UTF-8 are skipped, whatever `text.errors` is."""
    try:
        return Document.of_text(name, (root / name).read_bytes().decode(), "strict", file_fields(root / name))
    except UnicodeDecodeError:
        return Skipped(name, "not UTF-8", (root / name).stat().st_size)


def _files(options: recipe.Files, errors: Errors, encoding: str) -> Source:
    paths, left_out, named = find_files(options.paths, options.column)
    if not any(path.stat().st_size for path in paths):
        raise UsageError(f"{', '.join(map(str, paths[:5]))}: empty. Add text, or name other paths in text.sources.")
    reading = ReadOptions(options.column, errors, encoding, options.soft_masks)

    @cache
    def checked() -> Checked:
        full = [path for path in paths if path.stat().st_size]
        errors = {path: error for path in full if (error := format_of(path).mistake(path, reading))}
        skipped = {path: error.reason for path, error in errors.items() if isinstance(error, EncodingError)}
        if len(skipped) == len(full):  # no other file remains
            skipped = {}
        skipped = {path: reason for path, reason in skipped.items() if path not in named}
        return Checked(skipped, [str(error) for path, error in errors.items() if path not in skipped])

    def documents() -> Iterator[Document | Skipped]:
        skipped, mistakes = checked()
        refuse(mistakes)
        for path in paths:
            size = path.stat().st_size
            if reason := skipped.get(path) if size else "empty":
                yield Skipped(str(path), reason, size)
            else:
                yield from format_of(path).documents(path, reading)

    is_plain = all(format_of(path).is_text and format_of(path).is_whole and not is_compressed(path) for path in paths)
    return Source(
        f"files {' '.join(options.paths)}",
        _fingerprint((format_of(path).fingerprint(path, reading), path) for path in paths),
        sum(path.stat().st_size for path in paths) if is_plain else None,
        False,
        documents,
        left_out,
        lambda: checked().mistakes,
    )


def _hub(options: recipe.Hub, errors: Errors) -> Source:
    name, folder = f"hub {options.dataset}", Path(options.dataset)
    # Hashing a streamed data set would download all of it even if its tokens are cached.
    revision = _folder_fingerprint(folder) if folder.is_dir() else hub_revision(options)
    parts = [options.dataset, options.config, options.split, options.column, revision]
    return Source(
        name,
        sha256(repr(parts).encode()).hexdigest(),
        None,
        options.streaming and not folder.is_dir(),
        lambda: documents_of_records(name, lambda: hub_records(options), options.column, errors),
    )


def _folder_fingerprint(folder: Path) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return _fingerprint((path.relative_to(folder).as_posix(), path) for path in files)


def _fingerprint(files: Iterable[tuple[str, Path]]) -> str:
    """Return a hash of labels and contents. Compressed files are hashed as stored."""
    total = sha256()
    for label, path in files:
        content = sha256()
        for chunk in read_bytes(path, decompress=False):
            content.update(chunk)
        total.update(f"{len(label)} {label} ".encode() + content.digest())
    return total.hexdigest()


def open_sources(text: recipe.Text) -> list[Source]:
    """Return the sources to train on, then those to validate on."""
    held_out = 0.0 if text.validation.sources else text.validation.fraction
    shares = [(options, options.weight, held_out) for options in text.sources]
    shares += [(options, 0.0, 1.0) for options in text.validation.sources]
    return [
        open_source(options, text.errors, text.encoding)._replace(weight=weight, held_out=share, errors=text.errors)
        for options, weight, share in shares
    ]


def size_of(sources: list[Source]) -> int | None:
    """Return the bytes of text of some sources. None if they are not known before reading."""
    sizes = [source.bytes for source in sources]
    return None if None in sizes else sum(size or 0 for size in sizes)


def check_sources(sources: list[Source]) -> None:
    """Raise one UsageError that lists every unreadable file of the sources."""
    refuse([mistake for source in sources for mistake in source.mistakes()])


def check_quickly(text: recipe.Text) -> None:
    """Raise UsageError for wrong paths, columns and encodings found within QUICK_SECONDS, before slow imports. Other
    mistakes, and those on the hub, are reported when the text is read."""
    end = time.monotonic() + QUICK_SECONDS
    for source in (*text.sources, *text.validation.sources):
        if isinstance(source, recipe.Files):
            options = ReadOptions(source.column, text.errors, text.encoding, source.soft_masks)
            local = [path for path in source.paths if not is_on_hub(path)]
            for path in find_files(local, source.column).files:
                if time.monotonic() > end:
                    return
                file_format = format_of(path)
                if file_format.quick_check(path, options) or not (error := file_format.mistake(path, options)):
                    continue
                if not file_format.is_whole:  # a column, for which the text need not be opened
                    raise error
                check_sources(open_sources(text))  # lists all unreadable files
