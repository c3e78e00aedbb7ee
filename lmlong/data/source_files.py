"""Find the files of paths, folders and globs. Each is read, skipped with a reason, or reported as a mistake."""

import os
from collections.abc import Iterator
from glob import glob, has_magic
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from lmlong.data.document import Skipped
from lmlong.data.formats.compression import COMPRESSED
from lmlong.data.formats.table import FORMATS, format_of
from lmlong.data.hub import find_on_hub
from lmlong.errors import UsageError
from lmlong.recipe.paths import is_on_hub, is_url

SHOWN = 50
"""The maximum number of mistakes that an error lists."""

LINK = "a link to a folder, which is not followed: name it"


class SourceFiles(NamedTuple):
    """The files to read, each once, in the order of the patterns and sorted within each."""

    files: list[Path]
    left_out: list[Skipped]  # unread files of folders
    named: set[Path]  # the `files` that were named, not found in a folder or by a glob


def find_files(patterns: list[str], column: str, key: str = "text.sources") -> SourceFiles:
    """Return the files that paths, folders and globs match. Raise one UsageError for all mistakes, which names the key
    or option that gave them."""
    files: dict[Path, Path] = {}  # by absolute path
    left_out: dict[str, Skipped] = {}
    local = [Path(pattern).expanduser() for pattern in patterns if not is_on_hub(pattern)]
    mistakes, named = [], {path.resolve() for path in local if path.exists()}
    for pattern in patterns:
        try:
            entries = list(_on_hub(pattern, column, named) if is_on_hub(pattern) else _entries(pattern, column))
        except UsageError as error:
            mistakes.append(str(error))
            continue
        skipped = sorted(entry for entry in entries if isinstance(entry, Skipped))
        paths = sorted(entry for entry in entries if isinstance(entry, Path))
        for path in paths:
            # files of the hub's cache are links to their content, which several may share
            files.setdefault(path if is_on_hub(pattern) else path.resolve(), path)
        left_out |= {entry.name: entry for entry in skipped}
        if not paths:
            mistakes.append(_no_match(pattern, skipped, key))
    refuse(mistakes)
    read = set(map(str, files.values()))
    unread = [entry for name, entry in left_out.items() if name not in read]
    return SourceFiles(list(files.values()), unread, {path for absolute, path in files.items() if absolute in named})


def refuse(mistakes: list[str]) -> None:
    """Raise all mistakes as one error, if there are any."""
    mistakes = list(dict.fromkeys(mistakes))
    if len(mistakes) > 1:
        more = [f"and {len(mistakes) - SHOWN:,} more"] if len(mistakes) > SHOWN else []
        raise UsageError("\n".join([f"{len(mistakes):,} files or paths cannot be read:", *mistakes[:SHOWN], *more]))
    if mistakes:
        raise UsageError(mistakes[0])


def _entries(pattern: str, column: str) -> Iterator[Path | Skipped]:
    path = Path(pattern).expanduser()
    if is_url(pattern):
        raise UsageError(f"{pattern}: addresses are not read. Download the file, or name a data set by hf://datasets/.")
    if path.is_dir():
        yield from _in_folder(path, column)
    elif path.exists():
        yield _entry(path, format_of(path).refusal)
    elif has_magic(pattern):
        files = filter(Path.is_file, map(Path, glob(str(path), recursive=True)))
        yield from (_entry(file, format_of(file).refusal) for file in files)


def _on_hub(url: str, column: str, named: set[Path]) -> Iterator[Path | Skipped]:
    """Download what is to be read of a file, a folder or a glob on the hub, and yield it. Like a folder on disk, a
    folder is read without hidden files. `named` gains a file that is named."""
    found = find_on_hub(url)
    read = []
    for name, size in found.sizes.items():
        path = found.local(name)
        if found.folder is None:
            reason = format_of(path).refusal
        elif any(part.startswith(".") for part in PurePosixPath(name).relative_to(found.folder).parts):
            reason = "hidden"
        elif name == "README.md":
            reason = "describes the data set: name it to read it"
        else:
            reason = format_of(path).skip_reason(column)
        if reason:
            yield Skipped(str(path), reason, size)
        else:
            read.append(name)
    found.download(read)
    paths = list(map(found.local, read))
    if found.where.path_in_repo in read:
        named.update(paths)
    yield from paths


def _no_match(pattern: str, skipped: list[Skipped], key: str) -> str:
    """Return what is wrong with a pattern that matches no file to read."""
    path = Path(pattern).expanduser()
    if not path.exists() and not has_magic(pattern) and not is_on_hub(pattern):
        return f"{pattern}: no such file or folder (relative to {Path.cwd()}). Correct {key}."
    if path.is_file():
        return f"{pattern}: {skipped[0].reason}. Correct {key}."
    left_out = f" (skipped: {', '.join(f'{entry.name}, {entry.reason}' for entry in skipped[:3])})" if skipped else ""
    suffixes = ", ".join(suffix for suffix in FORMATS if not format_of(Path(f"x{suffix}")).skip_reason(""))
    return (
        f"{pattern}: contains no supported file{left_out}. Supported in a folder: {suffixes}; text and records may be "
        f"compressed ({', '.join(COMPRESSED)}). Name other files one by one. Correct {key}."
    )


def _in_folder(folder: Path, column: str) -> Iterator[Path | Skipped]:
    """Yield the files of a folder. Like globs, this does not enter hidden folders and links to folders."""
    unreadable: list[OSError] = []
    for parent, folders, names in os.walk(folder, onerror=unreadable.append):
        for name in list(folders):
            path = Path(parent) / name
            if name.startswith(".") or path.is_symlink():
                folders.remove(name)
                yield Skipped(str(path), "hidden" if name.startswith(".") else LINK)
        for path in (Path(parent) / name for name in names):
            yield _entry(path, _skip_reason(path, column))
    for error in unreadable:
        yield Skipped(str(error.filename), f"cannot be read ({error.strerror})")


def _skip_reason(path: Path, column: str) -> str | None:
    """Return why a file of a folder is skipped, or None if it is read."""
    if path.name.startswith("."):
        return "hidden"
    if not path.is_file():
        return "not a file" if path.exists() else "a broken link"
    return format_of(path).skip_reason(column)


def _entry(path: Path, skip_reason: str | None) -> Path | Skipped:
    return Skipped(str(path), skip_reason, path.lstat().st_size) if skip_reason else path
