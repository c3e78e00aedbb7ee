"""The folder of a server's sessions: their files, forks, order and limits.

fork: a new file that names its parent and how many of the parent's pieces it begins with
upload: a state in ID.root, without tokens, which the file that begins with it names
delete: the file with its states, or while forks need it a last line that says so
"""

import hashlib
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import RLock

from lmlong.errors import CheckpointError, UsageError
from lmlong.inference import state_file
from lmlong.inference.state_table import KEY_BYTES, Piece, Place, StateTable, places
from lmlong.io.system_errors import explain_errors
from lmlong.serving.api_errors import ApiError
from lmlong.serving.session_file import NAME, ROOT, Header, Line, SessionFile, reason
from lmlong.serving.settings import Settings

EARLIER = re.compile(r"[0-9a-f]{24}(\.state|-[0-9a-f]{16}\.base)")
"""The names of files of sessions of earlier versions."""


class SessionFolder:
    """The files of sessions. One thread at a time may change them; any thread may ask what there is."""

    def __init__(self, path: Path, owners: Mapping[str, str], settings: Settings, states: StateTable):
        """`owners` identify a model; the sessions of other models are left alone."""
        self.path, self.bytes = path, 0
        self._owners, self._settings, self._states = owners, settings, states
        self._lock = RLock()
        self._files: dict[str, SessionFile] = {}  # by id; also deleted ones that forks need, and those of other models
        self._listed = set[str]()
        self._forks = Counter[str]()  # by id; also those that requests are making
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._find()

    @property
    def count(self) -> int:
        with self._lock:
            return len(self._listed)

    def get(self, name: str) -> SessionFile:
        """Return the file of a session. A session whose file was removed is unknown."""
        with self._lock:
            if name in self._listed and not self._files[name].path.exists():
                self._forget(name)
            if name not in self._listed:
                raise ApiError(404, f"Session {name!r} not found.", "session", "session_not_found")
            return self._files[name]

    def page(self, most: int, after: str | None = None) -> tuple[Sequence[SessionFile], str | None]:
        """Return up to `most` files, the oldest first, after those of earlier pages; and where the rest begins."""
        with self._lock:
            files = sorted((self._files[name] for name in self._listed), key=lambda file: file.cursor)
        if after is not None:
            files = [file for file in files if file.cursor > after]
        return files[:most], files[most - 1].cursor if len(files) > most else None

    def create(self, header: Header, line: Line) -> SessionFile:
        """Write the file of a new session."""
        if self.count >= self._settings.max_sessions:
            raise _quota_reached(f"{self.count:,} sessions")
        self.check_quota(len(header.line()) + len(line.line()))
        with explain_errors(self.path):
            file = SessionFile.create(self.path, header, line)
        with self._lock:
            self._add(file)
            self._listed.add(header.id)
            file.saved = self._files[header.parent].saved if header.parent else 0
        return file

    def append(self, file: SessionFile, line: Line) -> None:
        """Append a turn to a session, or the line that says that it is deleted."""
        if not line.deleted:
            self.check_quota(len(line.line()))
        before = file.bytes
        with explain_errors(file.path):
            file.append(line)
        self.bytes += file.bytes - before

    def delete(self, name: str) -> None:
        """Delete a session. Its file remains while forks need it."""
        file = self.get(name)
        if self._forks[name]:
            self.append(file, file.last.model_copy(update={"pieces": [], "deleted": True}))
        self._forget(name)

    def hold(self, name: str, forks: int) -> None:
        """Count one fork more that needs the file of a session, or one less."""
        with self._lock:
            self._forks[name] += forks
            if name not in self._listed:
                self._forget(name)

    def check_quota(self, more: int) -> None:
        """Refuse a request if `more` further bytes would exceed `max_session_bytes`."""
        most = self._settings.max_session_bytes
        if self.bytes + more > most:
            raise _quota_reached(f"{most:,} bytes of sessions")

    def pieces(self, file: SessionFile) -> tuple[SessionFile, list[Piece], int]:
        """Return the file in which the text of a session begins, its pieces, and how many of them are its parent's."""
        files, parts = [file], [file.pieces()]
        while (parent := files[-1].header.parent) is not None:
            files.append(self._files[parent])
            inherited, length = files[-1].pieces(), files[-2].header.length
            if len(inherited) < length:
                raise file.damaged("a session that it begins with has fewer pieces than it says")
            parts.append(inherited[:length])
        pieces = [piece for part in reversed(parts) for piece in part]
        return files[-1], pieces, len(pieces) - len(parts[0])

    def first_key(self, header: Header) -> bytes:
        """Return the key before the first piece of a file: that of its uploaded state, if any."""
        if not header.root:
            return self._states.empty
        return hashlib.blake2b(self._states.empty + header.id.encode(), digest_size=KEY_BYTES).digest()

    def own_places(self, file: SessionFile) -> list[tuple[bytes, int]]:
        """Return the keys and tokens of the states of a session that are not its parent's."""
        first, pieces, inherited = self.pieces(file)
        return places(Place(self.first_key(first.header)), pieces)[inherited + bool(inherited) :]

    def _add(self, file: SessionFile) -> None:
        with self._lock:
            self._files[file.header.id] = file
            self._forks.update(filter(None, [file.header.parent]))
            self.bytes += file.all_bytes

    def _forget(self, name: str) -> None:
        """Take a session off the list, and delete all files that no session needs any more."""
        with self._lock:
            self._listed.discard(name)
            while name in self._files and not self._forks[name]:
                file = self._files[name]
                with suppress(CheckpointError):  # a damaged file goes too
                    for key, _ in self.own_places(file):
                        self._states.forget(key)
                        self._states.remove(key)
                del self._files[name]
                self.bytes -= file.all_bytes
                file.path.unlink(missing_ok=True)
                if file.header.root:
                    state_file.delete(file.root)
                self._forks.subtract(filter(None, [file.header.parent]))
                above = self._files.get(file.header.parent or "")
                name = above.header.id if above is not None and above.last.deleted else ""

    def _find(self) -> None:
        """Read what is in the folder. Damaged files are reported; these and those of other models are left alone."""
        skipped = list[str]()
        for path in sorted(self.path.iterdir()):
            if EARLIER.fullmatch(path.name):
                remedy = "Name another folder by --sessions, or rename this one."
                raise UsageError(f"{self.path}: its sessions are of an earlier version of lmlong. {remedy}")
            if NAME.fullmatch(path.name):
                try:
                    if file := SessionFile.open(path):
                        self._add(file)
                except (OSError, ValueError) as error:
                    skipped.append(f"{path}: {reason(error)}")
        for path in self.path.glob("*.root"):  # those of uploads that were not completed
            if ROOT.fullmatch(path.name) and not path.with_suffix(".session").exists():
                state_file.delete(path)
        whole = self._whole()
        for name, file in self._files.items():
            if name not in whole:
                skipped.append(f"{file.path}: a session that it begins with is missing")
            elif file.header.owners == self._owners and not file.last.deleted:
                self._listed.add(name)
        for line in skipped:
            print(f"skipped {line}", file=sys.stderr)
        for file in [] if skipped else [*self._files.values()]:
            if file.last.deleted and file.header.id in self._files:
                self._forget(file.header.id)

    def _whole(self) -> set[str]:
        """Return the sessions whose parents, and the parents of these, are all there."""
        forks = defaultdict[str | None, list[str]](list)
        for name, file in self._files.items():
            forks[file.header.parent].append(name)
        whole = forks[None]
        for name in whole:
            whole += forks[name]
        return {*whole}


def _quota_reached(limit: str) -> ApiError:
    message = f"{limit} are all that this server keeps. Delete some."
    return ApiError(429, message, "session", "insufficient_quota")
