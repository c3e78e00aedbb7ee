"""The files that paths, folders and globs name: each is read, left out with the reason, or a mistake."""

import os
from collections.abc import Iterator
from glob import glob, has_magic
from pathlib import Path, PurePath
from typing import NamedTuple

from lmlong.data import documents, fasta
from lmlong.data.archives import is_archive
from lmlong.data.reading import COMPRESSED, Skipped
from lmlong.errors import UsageError

PLAIN = (".txt", ".md", ".py")
RECORDS = {".jsonl": "json", ".ndjson": "json", ".parquet": "parquet", ".arrow": "arrow"}
"""Suffix -> builder of `datasets`."""
NAMED_RECORDS = {".json": "json", ".csv": "csv", ".tsv": "csv"}
"""Records too, or anything else; so in a folder they are left out."""

NOT_TEXT = {
    **dict.fromkeys((".7z", ".rar"), "an archive of a kind that is not read: unpack it"),
    **dict.fromkeys((".doc", ".odt", ".rtf"), "a document of a kind that is not read: save it as .docx or plain text"),
    **dict.fromkeys((".mobi", ".azw3"), "an e-book of a kind that is not read: convert it to EPUB or plain text"),
}
MARKUP = (".xml", ".svg")

SHOWN = 50
"""Most mistakes that are told of one source."""


class Found(NamedTuple):
    """The files to read, each once, in the order of the patterns, sorted within."""

    files: list[Path]
    left_out: list[Skipped]  # files of folders that are not read
    named: set[Path]  # of `files`, those that were named, and not found in a folder or by a glob


def find_files(patterns: list[str], column: str) -> Found:
    """Return the files that paths, folders and globs match; all mistakes are one error."""
    found: dict[Path, Path] = {}
    left_out: dict[str, Skipped] = {}
    mistakes, named = [], {Path(pattern).expanduser().resolve() for pattern in patterns}
    for pattern in patterns:
        entries = list(_entries(pattern, column))
        skipped = sorted(entry for entry in entries if isinstance(entry, Skipped))
        files = sorted(entry for entry in entries if isinstance(entry, Path))
        for file in files:
            found.setdefault(file.resolve(), file)
        left_out |= {entry.name: entry for entry in skipped}
        if not files:
            mistakes.append(_nothing(pattern, skipped))
    refuse(mistakes)
    taken = set(map(str, found.values()))
    rest = [entry for name, entry in left_out.items() if name not in taken]
    return Found(list(found.values()), rest, {file for place, file in found.items() if place in named})


def refuse(mistakes: list[str]) -> None:
    """Raise all mistakes as one error, if there are any."""
    if len(mistakes) > 1:
        more = [f"and {len(mistakes) - SHOWN:,} more"] if len(mistakes) > SHOWN else []
        raise UsageError("\n".join([f"{len(mistakes):,} files or paths cannot be read:", *mistakes[:SHOWN], *more]))
    if mistakes:
        raise UsageError(mistakes[0])


def kind(path: PurePath) -> str:
    """Return the suffix that says how a file is read, in lower case, without that of its compression."""
    suffix = path.suffix.lower()
    return PurePath(path.stem).suffix.lower() if suffix in COMPRESSED else suffix


def builder_of(path: Path) -> str | None:
    """Return the builder of `datasets` for a file of records; None for plain text."""
    return {**RECORDS, **NAMED_RECORDS}.get(kind(path))


def is_document(path: PurePath) -> bool:
    """Return whether a file is converted to text by another process."""
    return path.suffix.lower() in documents.KINDS


def is_fasta(path: PurePath) -> bool:
    """Return whether each record of a file is a sequence."""
    return kind(path) in fasta.KINDS


def _entries(pattern: str, column: str) -> Iterator[Path | Skipped]:
    path = Path(pattern).expanduser()
    if path.is_dir():
        yield from _in_folder(path, column)
    elif path.exists():
        reason = why_not_text(path)
        yield Skipped(str(path), reason) if reason else path
    elif has_magic(pattern):
        for file in map(Path, glob(str(path), recursive=True)):
            if file.is_file():
                reason = why_not_text(file)
                yield _skipped(file, reason) if reason else file


def why_not_text(path: PurePath) -> str | None:
    """Return why a file is not read even if it is named; None if it is."""
    if kind(path) in documents.KINDS and not is_document(path):
        return "a compressed document: unpack it"
    return NOT_TEXT.get(kind(path)) or documents.why_not(kind(path))


def why_not_inside(path: PurePath) -> str | None:
    """Return why a file of an archive is not read; None where it is."""
    if any(part.startswith(".") for part in path.parts):
        return "hidden"
    if path.suffix.lower() in PLAIN:
        return None
    return "inside an archive only plain text is read: unpack it"


def _nothing(pattern: str, skipped: list[Skipped]) -> str:
    """Return what is wrong with a pattern of which nothing is read."""
    path = Path(pattern).expanduser()
    if not path.exists() and not has_magic(pattern):
        return f"{pattern}: no such file or folder (seen from {Path.cwd()}). Correct text.sources."
    if path.is_file():
        return f"{pattern}: {skipped[0].reason}. Correct text.sources."
    left_out = f" (left out: {', '.join(f'{entry.name}, {entry.reason}' for entry in skipped[:3])})" if skipped else ""
    known = ", ".join((*PLAIN, *RECORDS, *fasta.KINDS))
    return (
        f"{pattern}: matches no file that is read{left_out}. A folder is searched for {known}, each also compressed as "
        f"{', '.join(COMPRESSED)}, for {', '.join(documents.KINDS)}, and for ZIP and TAR archives; other files must be "
        "named. Correct the paths of text.sources."
    )


def _in_folder(folder: Path, column: str) -> Iterator[Path | Skipped]:
    """Iterate over all that a folder holds; hidden folders and links to folders are not searched, as with globs."""
    unreadable: list[OSError] = []
    for place, folders, names in os.walk(folder, onerror=unreadable.append):
        for name in list(folders):
            if name.startswith(".") or (Path(place) / name).is_symlink():
                folders.remove(name)
                why = "hidden" if name.startswith(".") else "a link to a folder, which is not followed: name it"
                yield Skipped(str(Path(place) / name), why)
        for path in (Path(place) / name for name in names):
            reason = _why_not(path, column)
            yield _skipped(path, reason) if reason else path
    for error in unreadable:
        yield Skipped(str(error.filename), f"cannot be read ({error.strerror})")


def _why_not(path: Path, column: str) -> str | None:
    """Return why a file of a folder is not read; None where it is."""
    suffix = kind(path)
    if path.name.startswith("."):
        return "hidden"
    if not path.is_file():
        return "no file" if path.exists() else "a link to nothing"
    if suffix == ".arrow" and path.name.startswith("cache-"):
        return "a cache of `datasets`"
    if suffix in PLAIN or suffix in RECORDS or suffix in fasta.KINDS or is_archive(path):
        return None
    if suffix in documents.KINDS:
        return why_not_text(path)
    if suffix in NAMED_RECORDS:
        return f"maybe no records: name it to read column '{column}' of them"
    if suffix in MARKUP:
        return "markup: convert it to plain text, or name it to read its tags too"
    return NOT_TEXT.get(suffix, "of no known kind: name it to read it as plain text")


def _skipped(path: Path, why: str) -> Skipped:
    return Skipped(str(path), why, path.lstat().st_size)
