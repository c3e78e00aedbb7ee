"""Files of data sets on the Hugging Face Hub, downloaded by huggingface_hub into its own cache.

What a commit lists is kept in the cache of lmlong, so that a commit is read again without a network.
"""

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import cache
from glob import has_magic
from pathlib import Path, PurePosixPath
from threading import Event, Lock
from typing import NamedTuple

from tqdm import tqdm

from lmlong.data.hub_path import HubPath, explained, is_inside, parse
from lmlong.errors import UsageError, nearest
from lmlong.io.cache import cache_folder, key_of
from lmlong.io.files import atomic_write, read_checksummed, with_checksum
from lmlong.recipe.paths import HUB
from lmlong.report.progress import Progress

DOWNLOADS = 8
"""Files that are downloaded at the same time."""


class HubFiles(NamedTuple):
    """The files of a commit that a path, folder or glob matches."""

    where: HubPath
    sizes: dict[str, int]  # of each file, by its path in the data set
    folder: str | None  # whose files these are, if the path is a folder

    def local(self, name: str) -> Path:
        """Return where the hub's cache has a file once it is downloaded."""
        return self.where.snapshot / name

    def download(self, names: Iterable[str]) -> None:
        """Download the files that the cache does not have."""
        missing = {name: self.sizes[name] for name in names if not self.local(name).exists()}
        if not missing:
            return
        stopped, lock = Event(), Lock()
        with (
            explained(self.where),
            Progress(f"{HUB}datasets/{self.where.repository}", sum(missing.values())) as progress,
            ThreadPoolExecutor(DOWNLOADS) as pool,
        ):

            def download(name: str) -> None:
                from huggingface_hub import hf_hub_download

                where, bar = self.where, _bar(progress, lock, stopped)
                got = hf_hub_download(
                    where.repository, name, repo_type="dataset", revision=where.revision, tqdm_class=bar
                )
                if os.path.abspath(got) != os.path.abspath(self.local(name)):
                    raise UsageError(f"{where}: the hub answers with another commit. Try again.")

            try:
                for _ in pool.map(download, missing):
                    pass
            except BaseException:
                stopped.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise


def find_on_hub(url: str) -> HubFiles:
    """Return the files that an hf:// path, folder or glob matches, before they are downloaded."""
    where = parse(url).commit
    path = PurePosixPath(where.path)
    if has_magic(where.path):
        first = next(number for number, part in enumerate(path.parts) if has_magic(part))
        below = _tree(where, "/".join(path.parts[:first]), True) or {}
        matching = {name: size for name, size in below.items() if _matches(PurePosixPath(name).parts, path.parts)}
        if matching:
            return HubFiles(where, matching, None)
    elif (inside := _tree(where, where.path, True)) is not None:
        return HubFiles(where, inside, where.path)
    elif where.path in (siblings := _tree(where, _parent(path), False) or {}):
        return HubFiles(where, {where.path: siblings[where.path]}, None)
    names = _tree(where, "", True) or {}
    folders = {str(folder) for name in names for folder in PurePosixPath(name).parents} - {"."}
    known = sorted(folders) + list(names)
    hint = nearest(where.path, known) or f" It has {', '.join(known[:5])}{' ...' if known[5:] else ''}."
    raise UsageError(f"{url}: the data set has no such file or folder.{hint}")


def local_file(url: str) -> Path:
    """Download the one file that an hf:// path names, and return where it is."""
    found = find_on_hub(url)
    if found.folder is not None or len(found.sizes) != 1:
        raise UsageError(f"{url}: matches {len(found.sizes):,} files. Name one.")
    found.download(found.sizes)
    return found.local(*found.sizes)


@cache
def _tree(where: HubPath, folder: str, recursive: bool) -> dict[str, int] | None:
    """Return the sizes of the files in a folder of a commit; None if the folder does not exist."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import EntryNotFoundError, OfflineModeIsEnabled
    from huggingface_hub.hf_api import RepoFile

    kept = cache_folder() / "hub" / f"{key_of(where.repository, where.revision, folder, recursive)}.json"
    with suppress(OSError, ValueError):
        return dict(read_checksummed(kept.read_bytes())["files"])
    with explained(where):
        try:
            entries = HfApi().list_repo_tree(
                where.repository, folder or None, recursive=recursive, revision=where.revision, repo_type="dataset"
            )
            files = {entry.path: entry.size for entry in entries if isinstance(entry, RepoFile)}
        except EntryNotFoundError:
            return None
        except OfflineModeIsEnabled:
            if not where.snapshot.is_dir():
                raise
            return _downloaded(where.snapshot, folder, recursive)
    if unsafe := [name for name, size in files.items() if not _is_file(name, size, folder)]:
        raise UsageError(f"{where}: the hub lists {unsafe[0]!r}, which is not a path in the data set.")
    with suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(kept, with_checksum({"files": files}))
    return files


def _downloaded(root: Path, folder: str, recursive: bool) -> dict[str, int] | None:
    """Return the sizes of the files in a folder of a commit that the hub's cache has."""
    paths = (root / folder).glob("**/*" if recursive else "*")
    files = {path.relative_to(root).as_posix(): path.stat().st_size for path in paths if path.is_file()}
    return files if (root / folder).is_dir() else None


def _is_file(name: object, size: object, folder: str) -> bool:
    """Return whether the hub lists a file in a folder of the data set."""
    return isinstance(name, str) and is_inside(name) and name.startswith(folder) and type(size) is int


def _parent(path: PurePosixPath) -> str:
    return "" if path.parent == PurePosixPath() else str(path.parent)


def _matches(parts: tuple[str, ...], patterns: tuple[str, ...]) -> bool:
    """Return whether a glob matches a path, as Python's does: ** crosses folders, and only a pattern that begins with a
    dot matches a hidden name."""
    if not parts or not patterns:
        return not parts and set(patterns) <= {"**"}
    hidden = parts[0].startswith(".") and not patterns[0].startswith(".")
    if patterns[0] == "**":
        return _matches(parts, patterns[1:]) or (not hidden and _matches(parts[1:], patterns))
    return not hidden and fnmatchcase(parts[0], patterns[0]) and _matches(parts[1:], patterns[1:])


def _bar(progress: Progress, lock: Lock, stopped: Event) -> type[tqdm]:
    """Return the class of the bars of one file, which move `progress`. There may be two, which count the same bytes."""
    most = 0

    class Bar(tqdm):
        def __init__(self, **options: object):
            super().__init__(disable=True)
            self.count = 0

        def update(self, n: float | None = 1) -> None:
            nonlocal most
            if stopped.is_set():
                raise InterruptedError("stopped")
            self.count += int(n or 0)
            with lock:
                progress.update(max(0, self.count - most))
                most = max(most, self.count)

    return Bar
