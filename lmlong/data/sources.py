"""Sources of documents: each kind of source in a recipe becomes a stream of documents and a fingerprint."""

import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from lmlong import recipe
from lmlong.data import documents as converted
from lmlong.data.archives import archive_documents, is_archive
from lmlong.data.encoding import UTF8, EncodingError, find_encoding, marked
from lmlong.data.fasta import fasta_documents
from lmlong.data.files import builder_of, find_files, is_document, is_fasta, kind, refuse, why_not_inside
from lmlong.data.reading import (
    COMPRESSED,
    Document,
    Errors,
    Skipped,
    file_document,
    place_of,
    read,
    text_document,
)
from lmlong.data.records import documents_of, file_records, hub_records, hub_revision
from lmlong.data.text_file import converted_document
from lmlong.errors import UsageError

NOT_STDLIB = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "encodings"}
"""Folders of the standard library that are left out; most of `encodings` is tables that are near-copies of another."""

Records = Callable[[Path], Iterator[Document | Skipped] | None]


class Source(NamedTuple):
    """A source of documents that can be read again and again."""

    name: str
    fingerprint: str  # changes when the documents do
    bytes: int | None  # of text; None where that is not known before reading
    remote: bool  # reading it twice means downloading it twice
    documents: Callable[[], Iterator[Document | Skipped]]
    left_out: Sequence[Skipped] = ()  # of what was searched, before anything was read
    mistakes: Callable[[], list[str]] = list
    """What is wrong with the documents that are to be read, of each file that has a mistake."""


def open_source(options: recipe.Source, errors: Errors, encoding: str = "auto") -> Source:
    """Open a source of a recipe, and fingerprint it."""
    if isinstance(options, recipe.PythonStdlib):
        return _python_stdlib()
    if isinstance(options, recipe.Files):
        return _files(options, errors, encoding)
    return _hub(options, errors)


def _python_stdlib() -> Source:
    """Return the standard library, its documents named by relative paths, so that it is one corpus on every machine."""
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
    """Iterate over its modules; folders of other packages, which may change at any time, are not entered."""
    for folder, below, files in os.walk(root):
        below[:] = [name for name in below if name not in NOT_STDLIB]
        here = Path(folder).relative_to(root)
        yield from ((here / name).as_posix() for name in files if name.endswith(".py"))


def _stdlib_document(root: Path, name: str) -> Document | Skipped:
    """Return a module; the few that declare another encoding are left out, whatever text.errors says."""
    try:
        return text_document(name, (root / name).read_bytes().decode(), "strict", place_of(root / name))
    except UnicodeDecodeError:
        return Skipped(name, "not UTF-8", (root / name).stat().st_size)


def _files(options: recipe.Files, errors: Errors, encoding: str) -> Source:
    paths, left_out, named = find_files(options.paths, options.column)
    if not any(path.stat().st_size for path in paths):
        raise UsageError(f"{', '.join(map(str, paths[:5]))}: empty. Add text, or name other paths in text.sources.")

    def records(path: Path) -> Iterator[Document | Skipped] | None:
        """Return what a file holds several of; None where it is one document."""
        if is_archive(path):
            return archive_documents(path, errors, encoding, why_not_inside)
        if is_fasta(path):
            return fasta_documents(read(path), str(path), options.soft_masks)
        if builder := builder_of(path):
            load = partial(file_records, path, builder, kind(path) == ".tsv", encoding)
            return documents_of(str(path), load, options.column, errors)
        return None

    @cache
    def judged() -> dict[Path, str | UsageError]:
        """Return the encoding that each file of plain text is read in, or the mistake of any that is not empty."""
        return {path: _judge(path, records, errors, encoding) for path in paths if path.stat().st_size}

    @cache
    def undecodable() -> dict[Path, str]:
        """Return why files are left out that were not named and cannot be decoded; none if no other file is left."""
        errors = {path: found for path, found in judged().items() if isinstance(found, EncodingError)}
        return {
            path: found.reason for path, found in errors.items() if path not in named and len(errors) < len(judged())
        }

    def mistakes() -> list[str]:
        skipped = undecodable()
        return [str(found) for path, found in judged().items() if isinstance(found, UsageError) and path not in skipped]

    def documents() -> Iterator[Document | Skipped]:
        refuse(mistakes())
        for path in paths:
            if not path.stat().st_size:
                yield Skipped(str(path), "empty")
            elif reason := undecodable().get(path):
                yield Skipped(str(path), reason, path.stat().st_size)
            elif (inside := records(path)) is not None:
                yield from inside
            elif is_document(path):
                yield _converted_document(path)
            else:
                yield file_document(path, errors, str(judged().get(path, UTF8)))

    plain = not any(path.suffix.lower() in COMPRESSED or is_document(path) or records(path) for path in paths)
    return Source(
        f"files {' '.join(options.paths)}",
        _fingerprint((_label(path, options, encoding), path) for path in paths),
        sum(path.stat().st_size for path in paths) if plain else None,
        False,
        documents,
        left_out,
        mistakes,
    )


def _judge(path: Path, records: Records, errors: Errors, encoding: str) -> str | UsageError:
    """Return the encoding that a file of plain text is read in, or the mistake of any file."""
    try:
        if builder_of(path):
            next(records(path) or iter(()), None)
        elif (inside := records(path)) is not None:
            for _ in inside:
                pass
        elif errors == "strict" and not is_document(path):
            return find_encoding(partial(read, path), str(path), encoding)
        return _told(path, encoding) or UTF8
    except UsageError as error:
        return error


def _converted_document(path: Path) -> Document | Skipped:
    try:
        return converted_document(path)
    except converted.ConversionError as error:
        return Skipped(str(path), f"cannot be converted ({error})", path.stat().st_size)


def _told(path: Path, encoding: str) -> str | None:
    """Return the encoding of a plain file that the recipe or a byte order mark tells."""
    if encoding != "auto":
        return encoding
    try:
        return marked(next(read(path), b""))
    except UsageError:  # damaged, which is told with all other mistakes
        return None


def _label(path: Path, options: recipe.Files, encoding: str) -> str:
    """Return what the text of a file depends on beside its bytes."""
    label = f"{options.column} {kind(path)} {path.suffix}"
    if is_document(path):
        return f"{label} by {converted.reader_of(kind(path))}"
    if is_fasta(path):
        return f"{label} soft masks {options.soft_masks}"
    if is_archive(path):
        return f"{label} archive {encoding}"
    how = builder_of(path) or _told(path, encoding)
    return label + (f" as {how} {encoding}" if how else "")


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
    errors: Errors = "strict"


def open_inputs(text: recipe.Text) -> list[Input]:
    """Return the sources to train on, then those to validate on."""
    held_out = 0.0 if text.validation.sources else text.validation.fraction
    shares = [(options, options.weight, held_out) for options in text.sources]
    shares += [(options, 0.0, 1.0) for options in text.validation.sources]
    return [
        Input(open_source(options, text.errors, text.encoding), weight, share, text.errors)
        for options, weight, share in shares
    ]


def check(inputs: list[Input]) -> None:
    """Refuse sources of which anything cannot be read, and name all of it."""
    refuse([mistake for entry in inputs for mistake in entry.source.mistakes()])
