"""Paths of files on the Hugging Face Hub, hf://datasets/OWNER/NAME@REVISION/PATH, and the commits of their revisions.

A revision is resolved to its commit once, and the processes that this one starts read the same commit.
"""

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, unquote

from lmlong import recipe
from lmlong.errors import UsageError
from lmlong.io.files import atomic_write
from lmlong.recipe.paths import HUB, is_on_hub

COMMITS = "LMLONG_HUB_COMMITS"
"""The environment variable with the commits of the revisions that were resolved."""

COMMIT = re.compile(r"[0-9a-f]{40}")

UNSAFE = re.compile(r"[\\:\0-\x1f\ud800-\udfff]")
"""Characters that no path of a data set has."""

URL = re.compile(
    r"hf://datasets/(?P<repository>\w[\w.-]*/\w[\w.-]*)"
    r"(@(?P<revision>refs/(convert|pr)/[\w-]+|[^/@]+))?(/(?P<path>.*))?",
    re.ASCII | re.DOTALL,
)


class HubPath(NamedTuple):
    """A file, folder or glob of a data set on the hub."""

    repository: str
    revision: str  # a branch, tag or commit
    path: str  # empty for the whole data set

    def __str__(self) -> str:
        inside = f"/{self.path}" if self.path else ""
        return f"{HUB}datasets/{self.repository}@{quote(self.revision, safe='')}{inside}"

    @property
    def commit(self) -> "HubPath":
        """The same path at the commit of its revision."""
        if COMMIT.fullmatch(self.revision):
            return self
        known, name = json.loads(os.environ.get(COMMITS, "{}")), f"{self.repository}@{self.revision}"
        if name not in known:
            known[name] = _resolve(self)
            os.environ[COMMITS] = json.dumps(known)
        return self._replace(revision=known[name])

    @property
    def cache(self) -> Path:
        """The folder of the data set in the hub's cache."""
        from huggingface_hub import constants

        return Path(os.path.abspath(constants.HF_HUB_CACHE)) / f"datasets--{self.repository.replace('/', '--')}"

    @property
    def snapshot(self) -> Path:
        """The folder of the commit in the hub's cache."""
        return self.cache / "snapshots" / self.revision


def parse(url: str) -> HubPath:
    """Return the parts of an hf:// path. Raise UsageError if it is not one of a data set."""
    match = URL.fullmatch(url)
    revision = unquote(match["revision"] or "main") if match else ""
    path = "/".join(part for part in (match["path"] or "").split("/") if part) if match else ""
    if match is None or not is_inside(revision) or (path and not is_inside(path)):
        raise UsageError(f"{url}: not a path of a data set. Write hf://datasets/OWNER/NAME@REVISION/PATH.")
    return HubPath(match["repository"], revision, path)


def is_inside(path: str) -> bool:
    """Return whether a path, joined to a folder, is below it on any operating system, and can be encoded."""
    return not {"", ".", ".."} & set(path.split("/")) and not UNSAFE.search(path)


def with_commits(text: recipe.Text, before: recipe.Text | None = None) -> recipe.Text:
    """Return a text whose hf:// paths name commits: those that the same paths have in the text `before`, or those of
    their revisions now."""
    old = [parse(url) for source in _files(before) for url in source.paths if is_on_hub(url)] if before else []
    kept = {path._replace(revision=""): path for path in old}

    def pinned(url: str) -> str:
        if not is_on_hub(url) or COMMIT.fullmatch((path := parse(url)).revision):
            return url
        return str(kept.get(path._replace(revision="")) or path.commit)

    def pin(sources: list[recipe.Source]) -> list[recipe.Source]:
        return [
            source.model_copy(update={"paths": list(map(pinned, source.paths))})
            if isinstance(source, recipe.Files)
            else source
            for source in sources
        ]

    validation = text.validation.model_copy(update={"sources": pin(text.validation.sources)})
    return text.model_copy(update={"sources": pin(text.sources), "validation": validation})


def _files(text: recipe.Text) -> list[recipe.Files]:
    sources = (*text.sources, *text.validation.sources)
    return [source for source in sources if isinstance(source, recipe.Files)]


def _resolve(where: HubPath) -> str:
    """Return the commit of a revision now; offline, the one that the cache had last."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import OfflineModeIsEnabled

    last = where.cache / "refs" / where.revision
    with explained(where):
        try:
            commit = str(HfApi().dataset_info(where.repository, revision=where.revision).sha)
        except OfflineModeIsEnabled:
            if not last.is_file():
                raise
            commit = last.read_text().strip()
    if not COMMIT.fullmatch(commit):
        raise UsageError(f"{where}: the hub answers {commit[:50]!r} instead of a commit. Check HF_ENDPOINT.")
    with suppress(OSError):  # the cache may be read-only
        last.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(last, commit)
    return commit


@contextmanager
def explained(where: HubPath) -> Iterator[None]:
    """Raise UsageErrors for the errors of the hub."""
    from huggingface_hub import constants, errors

    try:
        yield
    except UsageError:
        raise
    except errors.GatedRepoError:
        page = f"{constants.ENDPOINT}/datasets/{where.repository}"
        raise UsageError(
            f"{where}: access is granted on request. Ask for it at {page}, and log in: set HF_TOKEN, or run "
            "`hf auth login`."
        ) from None
    except errors.RepositoryNotFoundError:
        raise UsageError(
            f"{where}: no such data set, or a private one. Correct its name, or log in: set HF_TOKEN, or run "
            "`hf auth login`."
        ) from None
    except errors.RevisionNotFoundError:
        raise UsageError(f"{where}: the data set has no such revision. Name a branch, a tag or a commit.") from None
    except Exception as error:  # huggingface_hub raises those of the libraries below it, which depend on its version
        if constants.HF_HUB_OFFLINE:
            why = f"not in the hub's cache {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE is set"
            raise UsageError(f"{where}: {why}. Unset it to download the data set.") from None
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise UsageError(
            f"{where}: cannot be read from {constants.ENDPOINT} ({reason}). Try again, or set HF_HUB_OFFLINE=1 to read "
            "what is in the cache."
        ) from error
