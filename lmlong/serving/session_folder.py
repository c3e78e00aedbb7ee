"""Session files in a folder: their total size, and which files are bases of others.

`ID.state` is a session. `ID-DIGEST.base` is what a session was before it was changed or deleted, and remains while a
file needs it. Every file is complete or absent under its name, and a base is in the folder before any file that needs
it, so the folder is valid however the server ends.
"""

import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from lmlong.errors import CheckpointError, UsageError
from lmlong.inference import session_file
from lmlong.inference.session_file import Base, SessionFile
from lmlong.io.files import fsync
from lmlong.serving.session_info import ID, SessionInfo, info_of

SUFFIX, BASE, STAGED = ".state", ".base", ".new"

NAME = re.compile(rf"({ID.pattern})({SUFFIX}|-[0-9a-f]{{16}}{BASE})")
LEFT = re.compile(rf"\.*{ID.pattern}{STAGED}(\..*partial)?")
"""The names of files, and of those of a server that was killed while it wrote. All others belong to the user."""

HEADER = b'{"__metadata__":{"lmlong'
"""How a file begins, after eight bytes."""

LONGEST = 2048
"""Maximum bases of a session, each of which is a file to open when it is read."""

MOST_ROWS = 2
"""Maximum bytes of rows in the bases of a session, for each byte of the one without a base."""


@dataclass(eq=False)
class Kept:
    """A file of the folder."""

    file: SessionFile
    session: str
    bytes: int
    base: "Kept | None"
    users: int = 0
    """The number of files whose base it is."""
    is_live: bool = True
    """Whether it is what its session is now."""

    def __post_init__(self) -> None:
        base = self.base
        self.depth: int = base.depth + 1 if base else 0
        self.chain_rows: int = base.chain_rows + self.file.row_bytes if base else 0
        self.whole_bytes: int = base.whole_bytes if base else self.bytes
        """Bytes of the file without a base that it needs."""

    @property
    def state(self) -> "Kept":
        """The file with the state that its tokens follow: itself, unless it is a file of tokens."""
        return self if self.file.pieces is None or self.base is None else self.base

    @property
    def name(self) -> Base:
        return Base(self.session, self.file.sha256)

    def chain(self) -> "Iterator[Kept]":
        """Iterate over this file and its bases."""
        kept: Kept | None = self
        while kept is not None:
            yield kept
            kept = kept.base

    def takes(self, rows: int, size: int) -> bool:
        """Return whether it can be the base of a file with so many bytes of rows, and in all: whether that is small
        enough to be worth it, and the chain short enough to be read quickly."""
        within = self.depth < LONGEST and self.chain_rows + rows <= MOST_ROWS * self.whole_bytes
        return within and 2 * size <= self.whole_bytes


class Found(NamedTuple):
    """A file in the folder, and what its metadata say."""

    file: SessionFile
    info: SessionInfo


class SessionFolder:
    """The files of a folder that belong to a model. Only one thread at a time may change them."""

    def __init__(self, folder: Path, belongs: dict[str, str]):
        self.folder, self._belongs = folder, belongs
        self.live: dict[str, Kept] = {}
        self.found: dict[str, SessionInfo] = {}
        """The sessions that were in the folder."""
        self.bytes = 0
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._find()

    def path(self, session: str) -> Path:
        return self.folder / f"{session}{SUFFIX}"

    def staged(self, session: str) -> Path:
        return self.folder / f"{session}{STAGED}"

    def freed(self, session: str, base: Kept | None) -> int:
        """Return the bytes that are freed when a session is replaced by a file with this base."""
        old = self.live.get(session)
        return old.bytes if old is not None and not old.users and old is not base else 0

    def put(self, kept: Kept) -> None:
        """Move the staged file of a session to its place."""
        old, path = self.live.get(kept.session), self.path(kept.session)
        self._add(kept)
        if old is not None and old.users:
            _link(path, old)
        self.staged(kept.session).replace(path)
        kept.file = kept.file._replace(path=path)
        self.live[kept.session] = kept
        if old is not None:
            old.is_live = False
            self._release(old, is_replaced=True)

    def remove(self, session: str) -> None:
        """Delete a session; its file remains while others need it."""
        kept = self.live.pop(session)
        kept.is_live = False
        if kept.users:
            with suppress(FileNotFoundError):
                path = _hidden(self.path(session), kept.file)
                self.path(session).replace(path)
                kept.file = kept.file._replace(path=path)
        self._release(kept)

    def _add(self, kept: Kept) -> None:
        self.bytes += kept.bytes
        if kept.base is not None:
            kept.base.users += 1

    def _release(self, kept: Kept, is_replaced: bool = False) -> None:
        """Remove a file that no session and no other file needs, and then its bases."""
        this: Kept | None = kept
        while this is not None and not this.users and not this.is_live:
            if not is_replaced:
                this.file.path.unlink(missing_ok=True)
            is_replaced = False
            self.bytes -= this.bytes
            this = this.base
            if this is not None:
                this.users -= 1

    def _find(self) -> None:
        """Read what is in the folder. Damaged files are reported; these and those of other models are left alone."""
        found: dict[Base, Found] = {}
        skipped = False
        for path in sorted(self.folder.iterdir()):  # the former states of a session before itself
            if LEFT.fullmatch(path.name) and _is_unfinished(path):
                path.unlink()
            elif matched := NAME.fullmatch(path.name):
                try:
                    file = self._read(path, matched[1])
                except (CheckpointError, UsageError) as error:
                    print(f"skipped {error}", file=sys.stderr)
                    file, skipped = None, True
                if file is not None:
                    if (name := Base(matched[1], file.file.sha256)) in found:  # it was to be replaced
                        found[name].file.path.unlink()
                    found[name] = file
        kept: dict[Base, Kept | None] = {}
        for name in found:
            self._trace(name, found, kept)
        for name, each in kept.items():
            if each is not None:
                self._add(each)
                if each.is_live:
                    self.live[name.session], self.found[name.session] = each, found[name].info
        if not skipped and all(kept.values()):  # or else the bases of what is missing may still be needed
            for each in [each for each in kept.values() if each and not each.users and not each.is_live]:
                self._release(each)

    def _read(self, path: Path, session: str) -> Found | None:
        """Return a file of a session; None if it belongs to another one or to another model."""
        file, about = session_file.describe(path)
        if about.get("id", session) != session or any(about.get(key) != x for key, x in self._belongs.items()):
            return None
        if path.suffix == BASE and path != _hidden(path.with_name(session), file):
            return None
        try:
            return Found(file, info_of(session, about, path.stat().st_size))
        except (KeyError, ValueError) as error:
            raise CheckpointError(f"{path}: its {error} is missing or invalid.") from None

    def _trace(self, name: Base, found: dict[Base, Found], kept: dict[Base, Kept | None]) -> None:
        """Add a file with its bases to `kept`; None if one of them is missing."""
        names: list[Base] = []
        base: Base | None = name
        while base is not None and base in found and base not in kept and base not in names:
            names.append(base)
            base = found[base].file.base
        below = kept.get(base) if base is not None else None
        is_missing = base is not None and below is None
        for each in reversed(names):
            file, info = found[each]
            is_live = file.path.suffix == SUFFIX
            if below is not None and below.file.pieces is not None:  # a base holds a state
                is_missing = True
            below = None if is_missing else Kept(file, each.session, info.bytes, below, is_live=is_live)
            kept[each] = below


def has_own_header(data: bytes) -> bool:
    """Return whether this is the beginning of a file of a session, or of a state, which may be cut off."""
    return not data or (len(data) > 8 and HEADER.startswith(data[8 : 8 + len(HEADER)]))


def _is_unfinished(path: Path) -> bool:
    """Return whether a server began to write this file."""
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as file:
        return has_own_header(file.read(8 + len(HEADER)))


def _hidden(path: Path, file: SessionFile) -> Path:
    """Return the path of a file that is no longer a session."""
    return path.with_name(f"{path.stem}-{file.sha256[:16]}{BASE}")


def _link(path: Path, kept: Kept) -> None:
    """Give the file of a session the name of a base too, before another file takes its place."""
    hidden = _hidden(path, kept.file)
    try:
        os.link(path, hidden)
    except FileExistsError:
        pass
    except OSError:  # a file system without links
        shutil.copyfile(path, hidden)
        fsync(hidden)
    fsync(path.parent)
    kept.file = kept.file._replace(path=hidden)
