"""Files of data sets on the Hugging Face Hub, named by hf://datasets/OWNER/NAME@REVISION/PATH.

huggingface_hub parses the paths, lists and downloads the files, and keeps them in its own cache. A revision is resolved
to its commit once, and the processes that this one starts read the same commit. What a path matches in a commit is kept
in the cache of lmlong, so that it is read again without a network.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from glob import escape, glob, has_magic
from pathlib import Path, PurePosixPath
from threading import Event, Lock
from typing import Any, NamedTuple

import huggingface_hub  # which loads itself where it is used
from huggingface_hub import constants
from tqdm import tqdm

from lmlong import recipe
from lmlong.errors import UsageError, nearest
from lmlong.io.cache import cache_folder, key_of
from lmlong.io.files import atomic_write, read_checksummed, with_checksum
from lmlong.recipe.paths import is_on_hub
from lmlong.report.progress import Progress

COMMITS = "LMLONG_HUB_COMMITS"
"""The environment variable with the commits of the revisions that were resolved."""

COMMIT = re.compile(r"[0-9a-f]{40}")

UNSAFE = re.compile(r"[\\:\0-\x1f\ud800-\udfff]")
"""Characters that no path of a data set has."""

DOWNLOADS = 8
"""Files that are downloaded at the same time."""


class HubFiles(NamedTuple):
    """The files of a commit that a path, folder or glob matches."""

    where: "huggingface_hub.HfUri"
    sizes: dict[str, int]  # of each file, by its path in the data set
    folder: str | None  # whose files these are, if the path is a folder

    def local(self, name: str) -> Path:
        """Return where the hub's cache has a file once it is downloaded."""
        return _snapshot(self.where) / name

    def download(self, names: Iterable[str]) -> None:
        """Download the files that the cache does not have."""
        missing = [name for name in names if not self.local(name).exists()]
        total, stopped, lock = sum(self.sizes[name] for name in missing), Event(), Lock()
        with (
            explained(self.where),
            Progress(f"hf://datasets/{self.where.id}", total) as progress,
            ThreadPoolExecutor(DOWNLOADS) as pool,
        ):

            def download(name: str) -> None:
                where, bar = self.where, _bar(progress, lock, stopped)
                got = huggingface_hub.hf_hub_download(
                    where.id, name, repo_type="dataset", revision=where.revision, tqdm_class=bar
                )
                if os.path.abspath(got) != str(self.local(name)):
                    raise UsageError(f"{where.to_uri()}: the hub answers with another commit. Try again.")

            try:
                list(pool.map(download, missing))
            finally:
                stopped.set()


def parse(url: str) -> "huggingface_hub.HfUri":
    """Return the parts of an hf:// path. Raise UsageError if it is not one of a data set."""
    with suppress(ValueError):
        where = huggingface_hub.parse_hf_uri(url)
        revision, path = where.revision or "main", where.path_in_repo
        if where.type == "dataset" and is_inside(revision) and (not path or is_inside(path)):
            return replace(where, revision=revision)
    raise UsageError(f"{url}: not a path of a data set. Write hf://datasets/OWNER/NAME@REVISION/PATH.")


def is_inside(path: str) -> bool:
    """Return whether a path, joined to a folder, is below it on any operating system, and can be encoded."""
    return not {"", ".", ".."} & set(path.split("/")) and not UNSAFE.search(path)


def with_commits(text: recipe.Text, before: recipe.Text | None = None) -> recipe.Text:
    """Return a text whose hf:// paths name commits: those that the same paths have in the text `before`, or those of
    their revisions now."""
    old = [*before.sources, *before.validation.sources] if before else []
    urls = [url for source in old if isinstance(source, recipe.Files) for url in source.paths if is_on_hub(url)]
    kept = {replace(parse(url), revision=None): url for url in urls}

    def pinned(url: str) -> str:
        if not is_on_hub(url) or COMMIT.fullmatch((where := parse(url)).revision or ""):
            return url
        return kept.get(replace(where, revision=None)) or _at_commit(where).to_uri()

    def pin(sources: list[recipe.Source]) -> list[recipe.Source]:
        return [
            source.model_copy(update={"paths": list(map(pinned, source.paths))})
            if isinstance(source, recipe.Files)
            else source
            for source in sources
        ]

    validation = text.validation.model_copy(update={"sources": pin(text.validation.sources)})
    return text.model_copy(update={"sources": pin(text.sources), "validation": validation})


def find_on_hub(url: str) -> HubFiles:
    """Return the files that an hf:// path, folder or glob matches, before they are downloaded."""
    where = _at_commit(parse(url))
    path = where.path_in_repo
    if sizes := _sizes(where):
        return HubFiles(where, sizes, None if has_magic(path) or path in sizes else path)
    names = list(_sizes(replace(where, path_in_repo="")))
    known = sorted({str(folder) for name in names for folder in PurePosixPath(name).parents} - {"."}) + names
    hint = nearest(path, known) or f" It has {', '.join(known[:5])}{' ...' if known[5:] else ''}."
    raise UsageError(f"{url}: the data set has no such file or folder.{hint}")


def local_file(url: str) -> Path:
    """Download the one file that an hf:// path names, and return where it is."""
    found = find_on_hub(url)
    if found.folder is not None or len(found.sizes) != 1:
        raise UsageError(f"{url}: matches {len(found.sizes):,} files. Name one.")
    found.download(found.sizes)
    return found.local(*found.sizes)


def _at_commit(where: "huggingface_hub.HfUri") -> "huggingface_hub.HfUri":
    """Return the same path at the commit of its revision; without a network, at the one that the cache had last."""
    known, name = json.loads(os.environ.get(COMMITS, "{}")), f"{where.id}@{where.revision}"
    if name not in known:
        with explained(where):
            resolve, offline = huggingface_hub.HfApi().resolve_revision, constants.HF_HUB_OFFLINE
            commit = resolve(where.id, repo_type="dataset", revision=where.revision, local_files_only=offline).resolved
        if not COMMIT.fullmatch(commit):
            message = f"the hub answers {commit[:50]!r} instead of a commit. Check HF_ENDPOINT."
            raise UsageError(f"{where.to_uri()}: {message}")
        known[name] = commit
        os.environ[COMMITS] = json.dumps(known)
    return replace(where, revision=known[name])


def _sizes(where: "huggingface_hub.HfUri") -> dict[str, int]:
    """Return the sizes of the files that a path, folder or glob of a commit matches."""
    kept = cache_folder() / "hub" / f"{key_of(where.to_uri())}.json"
    with suppress(OSError, ValueError):
        return dict(read_checksummed(kept.read_bytes())["files"])
    with explained(where):
        sizes = _downloaded(where) if constants.HF_HUB_OFFLINE else _listed(where)
    if unsafe := [name for name in sizes if not is_inside(name)]:
        raise UsageError(f"{where.to_uri()}: the hub lists {unsafe[0]!r}, which is not a path in the data set.")
    with suppress(OSError):
        if not constants.HF_HUB_OFFLINE:  # the cache may have a part of the files
            kept.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(kept, with_checksum({"files": sizes}))
    return sizes


def _listed(where: "huggingface_hub.HfUri") -> dict[str, int]:
    """List what a path matches on the hub. Like Python's, a glob matches hidden files only if it names them."""
    files, pattern = huggingface_hub.HfFileSystem(skip_instance_cache=True), where.path_in_repo
    root = f"datasets/{where.id}@{where.revision}/"
    path = (root + pattern).rstrip("/")
    found: Any  # the entries by their paths
    try:
        if has_magic(pattern):
            found = files.glob(path, detail=True)
        else:
            entry = files.info(path)
            found = files.find(path, detail=True) if entry["type"] == "directory" else {path: entry}
    except FileNotFoundError as error:
        if error.__cause__:  # the data set or the commit does not exist
            raise error.__cause__ from None
        return {}
    takes_hidden = not has_magic(pattern) or "/." in f"/{pattern}"
    return {
        name.removeprefix(root): int(entry["size"])
        for name, entry in found.items()
        if entry["type"] == "file" and (takes_hidden or "/." not in name)
    }


def _downloaded(where: "huggingface_hub.HfUri") -> dict[str, int]:
    """List what a path matches in the hub's cache."""
    root = _snapshot(where).resolve(strict=True)
    pattern = f"{where.path_in_repo}/**" if (root / where.path_in_repo).is_dir() else where.path_in_repo
    paths = [Path(path) for path in glob(f"{escape(str(root))}/{pattern}", recursive=True)]
    return {path.relative_to(root).as_posix(): path.stat().st_size for path in paths if path.is_file()}


def _snapshot(where: "huggingface_hub.HfUri") -> Path:
    """Return the folder of a commit in the hub's cache."""
    folder = f"datasets--{where.id.replace('/', '--')}"
    return Path(os.path.abspath(constants.HF_HUB_CACHE), folder, "snapshots", where.revision or "")


@contextmanager
def explained(where: "huggingface_hub.HfUri") -> Iterator[None]:
    """Raise UsageErrors for the errors of the hub."""
    from huggingface_hub import errors

    page, log_in = f"{constants.ENDPOINT}/datasets/{where.id}", "log in: set HF_TOKEN, or run `hf auth login`."
    reasons: dict[type[Exception], str] = {
        errors.GatedRepoError: f"access is granted on request. Ask for it at {page}, and {log_in}",
        errors.RepositoryNotFoundError: f"no such data set, or a private one. Correct its name, or {log_in}",
        errors.RevisionNotFoundError: "the data set has no such revision. Name a branch, a tag or a commit.",
    }
    try:
        yield
    except UsageError:
        raise
    except Exception as error:  # huggingface_hub raises those of the libraries below it, which depend on its version
        if constants.HF_HUB_OFFLINE:
            why = f"not in the hub's cache {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE is set"
            other = f"{why}. Unset it to download the data set."
        else:
            cause = str(error).strip().split("\n")[0] or type(error).__name__
            why = f"cannot be read from {constants.ENDPOINT} ({cause})"
            other = f"{why}. Try again, or set HF_HUB_OFFLINE=1 to read what is in the cache."
        reason = next((reason for kind, reason in reasons.items() if isinstance(error, kind)), other)
        raise UsageError(f"{where.to_uri()}: {reason}") from error


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
